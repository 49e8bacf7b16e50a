/** The graph in its precomputed layers; only what is visible is drawn. */
function showGraph() {
  const canvas = get("drawing");
  const ACROSS = 150, DOWN = 58, WIDE = 132, HIGH = 34;
  const LINES = 400; // beside each other: more are a single area to the eye, and take the browser long
  const nodes = ops.map((op) => ({ op, x: places[op.name][0] * ACROSS, y: places[op.name][1] * DOWN, layer: places[op.name][1] }));
  const nodeOf = new Map(nodes.map((node) => [node.op.name, node]));
  const layers = [];
  for (const node of nodes) (layers[node.layer] ??= []).push(node);
  const waits = new Set(ops.flatMap((op) => op.waits.map((before) => `${before}\n${op.name}`)));
  const path = report.summary.critical_path.ops;
  const steps = new Set(path.slice(1).map((after, at) => `${path[at]}\n${after}`));
  const edges = [];
  const known = new Set();
  const connect = (before, after) => {
    const key = `${before}\n${after}`;
    if (known.has(key) || !nodeOf.has(before) || !nodeOf.has(after)) return;
    known.add(key);
    edges.push({ from: nodeOf.get(before), to: nodeOf.get(after), wait: waits.has(key), critical: steps.has(key) });
  };
  for (const [before, after] of report.graph.dependencies) connect(before, after);
  for (const op of ops) for (const before of op.waits) connect(before, op.name);

  const extent = (key) => nodes.reduce(([low, high], node) => [Math.min(low, node[key]), Math.max(high, node[key])], [Infinity, -Infinity]);
  const [left, right] = extent("x");
  const view = { scale: 1, x: 0, y: 0 }; // of the canvas' upper left corner, in the graph's own pixels
  let found = [], current = -1;

  const surface = surfaceOf(canvas, (context, width, height) => {
    const { scale } = view;
    const top = view.y, bottom = view.y + height / scale, near = view.x - WIDE, far = view.x + width / scale + WIDE;
    const X = (x) => (x - view.x) * scale, Y = (y) => (y - view.y) * scale;
    const within = (x) => Math.max(X(near), Math.min(X(far), x));
    const draw = (style, most, chosen) => {
      Object.assign(context, style);
      context.setLineDash(scale < 0.2 ? [] : (style.dash ?? [])); // of so thin lines no dashes are seen, but each is drawn
      const lines = new Map(), curves = [];
      for (const edge of edges) {
        const { from, to } = edge;
        if (!chosen(edge) || from.y > bottom || to.y < top || Math.max(from.x, to.x) < near || Math.min(from.x, to.x) > far) continue;
        const x1 = X(from.x), y1 = Y(from.y + HIGH / 2), x2 = X(to.x), y2 = Y(to.y - HIGH / 2);
        if (scale >= 0.2 && within(x1) === x1 && within(x2) === x2) {
          // An edge over several layers bypasses the ops between.
          curves.push([x1, y1, x2, y2, to.layer - from.layer > 1 && Math.abs(to.x - from.x) < WIDE ? WIDE * 0.75 * scale : 0]);
        } else {
          // Straight, and only as far as it is visible: wide layers have thousands of overlapping edges.
          const at = (x) => y1 + ((within(x) - x1) * (y2 - y1)) / (x2 - x1 || 1);
          const line = [within(x1), at(x1), within(x2), at(x2)];
          lines.set(line.map((end) => Math.round(end / 2)).join(), line);
        }
      }
      context.beginPath();
      for (const [x1, y1, x2, y2, aside] of curves) {
        context.moveTo(x1, y1);
        context.bezierCurveTo(x1 + aside, y1 + DOWN * 0.5 * scale, x2 + aside, y2 - DOWN * 0.5 * scale, x2, y2);
      }
      const every = Math.ceil(lines.size / most) || 1;
      [...lines.values()].forEach(([x1, y1, x2, y2], at) => {
        if (at % every) return;
        context.moveTo(x1, y1);
        context.lineTo(x2, y2);
      });
      context.stroke();
    };
    draw({ strokeStyle: theme.faint, lineWidth: 1 }, LINES, (edge) => !edge.wait && !edge.critical);
    draw({ strokeStyle: theme.accent, lineWidth: 1.2, dash: [5, 4] }, LINES, (edge) => edge.wait && !edge.critical);
    draw({ strokeStyle: theme.critical, lineWidth: 2.5 }, Infinity, (edge) => edge.critical);
    context.setLineDash([]);
    context.font = FONT;
    context.textBaseline = "middle";
    const matches = new Set(found);
    const first = Math.max(0, Math.floor((top - HIGH) / DOWN)), last = Math.min(layers.length - 1, Math.ceil((bottom + HIGH) / DOWN));
    for (let layer = first; layer <= last; layer += 1) {
      for (const node of layers[layer] ?? []) {
        if (node.x < near || node.x > far) continue;
        const { op } = node;
        const x = X(node.x - WIDE / 2), y = Y(node.y - HIGH / 2), wide = WIDE * scale, high = HIGH * scale;
        context.globalAlpha = found.length && !matches.has(op) ? 0.35 : 1;
        context.fillStyle = streamColour(op.stream);
        context.fillRect(x, y, wide, high);
        if (op === selection.op || op.critical) {
          context.strokeStyle = op === selection.op ? theme.ink : theme.critical;
          context.lineWidth = op === selection.op ? 3 : 2 * Math.min(1, 2 * scale);
          context.strokeRect(x, y, wide, high);
        }
        if (scale > 0.45) {
          context.fillStyle = theme["node-ink"];
          label(context, op.name, x + 5, y + high / 2 - (scale > 0.8 ? 7 : 0), wide - 8);
          if (scale > 0.8) label(context, `stream ${op.stream}, ${micros(op.cost)}`, x + 5, y + high / 2 + 8, wide - 8);
        }
      }
    }
    context.globalAlpha = 1;
  });

  const nodeAt = (x, y) => {
    const gx = x / view.scale + view.x, gy = y / view.scale + view.y;
    return (layers[Math.round(gy / DOWN)] ?? []).find((node) => Math.abs(node.x - gx) <= WIDE / 2 && Math.abs(node.y - gy) <= HIGH / 2);
  };
  const fit = () => {
    const { clientWidth: width } = canvas;
    view.scale = Math.min(1, Math.max(0.3, width / (right - left + 2 * WIDE)));
    Object.assign(view, { x: (left + right) / 2 - width / view.scale / 2, y: -DOWN });
    surface.redraw();
  };
  const centre = (op) => {
    const node = nodeOf.get(op.name);
    view.scale = Math.max(view.scale, 0.6);
    Object.assign(view, { x: node.x - canvas.clientWidth / view.scale / 2, y: node.y - canvas.clientHeight / view.scale / 2 });
    surface.redraw();
  };
  interactive(canvas, {
    move(dx, dy) {
      view.x -= dx / view.scale;
      view.y -= dy / view.scale;
      surface.redraw();
    },
    zoom(factor, x, y) {
      const scale = Math.min(3, Math.max(0.02, view.scale * factor));
      view.x += x / view.scale - x / scale;
      view.y += y / view.scale - y / scale;
      view.scale = scale;
      surface.redraw();
    },
    fit,
    hover(x, y) {
      const op = nodeAt(x, y)?.op;
      return op ? [op.name, op.target, `stream ${op.stream}, ${micros(op.cost)}, slack ${micros(op.slack)}`, ...(op.source ? [brief(op.source)] : [])] : null;
    },
    pick: (x, y) => select(nodeAt(x, y)?.op ?? null, { reveal: false }),
  });
  selection.listeners.push((op, reveal) => (op && reveal ? centre(op) : surface.redraw()));

  const search = get("search"), matches = get("matches");
  const tell = () => {
    matches.textContent = !search.value ? "" : found.length ? `${current + 1} of ${found.length}` : "nothing found";
  };
  const go = (by) => {
    if (!found.length) return;
    current = (current + by + found.length) % found.length;
    select(found[current]);
    tell();
  };
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    found = wanted ? ops.filter((op) => op.text.includes(wanted)) : [];
    current = -1;
    if (found.length) go(1);
    else surface.redraw();
    tell();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
  });
  get("next").addEventListener("click", () => go(1));
  get("previous").addEventListener("click", () => go(-1));
  fit();
}
