/** Canvases: sharp on any screen, redrawn at most once a frame, moved by pointer, wheel and keys. */

const GOLDEN = 0.618034;
const theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "raised", "ink", "faint", "line", "accent", "critical", "shade", "node-lightness", "node-ink"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
}
readTheme();

/** One colour for each stream; steps of the golden ratio spread hues evenly for any number of them. */
const streamColour = (stream) => `hsl(${(((stream * GOLDEN) % 1) * 360).toFixed(1)} 60% ${theme["node-lightness"]})`;

const surfaces = [];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readTheme();
  for (const surface of surfaces) surface.redraw();
});

/** A canvas that `draw(context, width, height)` fills, in CSS pixels. */
function surfaceOf(canvas, draw) {
  const context = canvas.getContext("2d");
  let asked = false;
  const surface = {
    canvas,
    frames: 0,
    redraw() {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => {
        asked = false;
        const { clientWidth: width, clientHeight: height } = canvas;
        const ratio = devicePixelRatio || 1;
        if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
          canvas.width = Math.round(width * ratio);
          canvas.height = Math.round(height * ratio);
        }
        context.setTransform(ratio, 0, 0, ratio, 0, 0);
        context.clearRect(0, 0, width, height);
        draw(context, width, height);
        surface.frames += 1;
      });
    },
  };
  new ResizeObserver(() => surface.redraw()).observe(canvas);
  surfaces.push(surface);
  return surface;
}

/** Text truncated to a width. A fixed width of a letter is assumed, since measuring thousands of names is slow. */
const LETTER = 6.7;
function label(context, text, x, y, room) {
  const letters = Math.floor(room / LETTER);
  if (letters >= 2) context.fillText(text.length > letters ? `${text.slice(0, letters - 1)}…` : text, x, y);
}
const FONT = "11px ui-monospace, monospace";

const tip = get("tip");
function showTip(lines, event) {
  tip.hidden = !lines;
  if (!lines) return;
  tip.textContent = lines.join("\n");
  const { innerWidth, innerHeight } = window;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
}

/**
 * Let a canvas be moved, zoomed, hovered and clicked.
 * view: move(dx, dy), zoom(factor, x, y), fit(), hover(x, y) → lines or null, pick(x, y), step(by) or none.
 */
function interactive(canvas, view) {
  const pointers = new Map();
  let travelled = 0;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [a, b] = [...pointers.values()];
    return { apart: Math.hypot(a.x - b.x, a.y - b.y), x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    travelled = 0;
    showTip(null);
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = at(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      showTip(view.hover(now.x, now.y), event);
    } else if (pointers.size === 2) {
      const old = spread();
      pointers.set(event.pointerId, now);
      const young = spread();
      view.zoom(young.apart / Math.max(old.apart, 1), young.x, young.y);
      travelled = Infinity;
    } else {
      pointers.set(event.pointerId, now);
      travelled += Math.hypot(now.x - before.x, now.y - before.y);
      view.move(now.x - before.x, now.y - before.y);
    }
  });
  const end = (event) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && travelled < 5) {
      const { x, y } = at(event);
      view.pick(x, y);
    }
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", () => showTip(null));
  canvas.addEventListener("wheel", (event) => {
    const { x, y } = at(event);
    if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(-event.deltaY / 250), x, y);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.move(-(event.deltaX || event.deltaY), 0);
    else return; // the page scrolls
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { clientWidth: width, clientHeight: height } = canvas;
    const act = {
      ArrowLeft: () => view.move(width / 8, 0),
      ArrowRight: () => view.move(-width / 8, 0),
      ArrowUp: () => (view.step ? view.step(-1) : view.move(0, height / 8)),
      ArrowDown: () => (view.step ? view.step(1) : view.move(0, -height / 8)),
      "+": () => view.zoom(1.5, width / 2, height / 2),
      "=": () => view.zoom(1.5, width / 2, height / 2),
      "-": () => view.zoom(1 / 1.5, width / 2, height / 2),
      0: () => view.fit(),
      Home: () => view.fit(),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  });
  const tools = canvas.parentElement.querySelector(".tools");
  for (const button of tools?.querySelectorAll("[data-zoom]") ?? []) {
    button.addEventListener("click", () => view.zoom(Number(button.dataset.zoom), canvas.clientWidth / 2, canvas.clientHeight / 2));
  }
  tools?.querySelector("[data-fit]")?.addEventListener("click", () => view.fit());
}
