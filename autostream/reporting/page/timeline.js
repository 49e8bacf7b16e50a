/** The time range that timeline and memory share, µs. */
const marginOf = (width) => Math.min(122, width / 4); // for the names of lanes
const range = { from: 0, to: Math.max(makespan, 1e-3), listeners: [] };
function showRange(from, to) {
  const whole = Math.max(makespan, 1e-3);
  const length = Math.min(Math.max(to - from, whole / 1e5), whole * 1.02);
  const start = Math.min(Math.max(from, -length * 0.01), whole - length * 0.99);
  Object.assign(range, { from: start, to: start + length });
  get("range").textContent = `${fixed(Math.max(start, 0))} to ${micros(Math.min(start + length, whole))}`;
  for (const listener of range.listeners) listener();
}
const pixelsPerMicro = (width) => (width - marginOf(width)) / (range.to - range.from);
const toX = (us, width) => marginOf(width) + (us - range.from) * pixelsPerMicro(width);
const toMicros = (x, width) => range.from + (x - marginOf(width)) / pixelsPerMicro(width);

/** How timeline and memory move: along time only. */
const timeView = (canvas, more) => ({
  move: (dx) => showRange(range.from - dx / pixelsPerMicro(canvas.clientWidth), range.to - dx / pixelsPerMicro(canvas.clientWidth)),
  zoom(factor, x) {
    const fixedPoint = toMicros(Math.max(x, marginOf(canvas.clientWidth)), canvas.clientWidth);
    showRange(fixedPoint - (fixedPoint - range.from) / factor, fixedPoint + (range.to - fixedPoint) / factor);
  },
  fit: () => showRange(0, makespan),
  ...more,
});

/** The first element of a sorted array whose `key` is above a bound. */
function firstAbove(things, bound, key) {
  let low = 0, high = things.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(things[middle]) > bound) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Ticks at 1, 2 or 5 times a power of ten, at least 80 pixels apart. */
function drawAxis(context, width, height) {
  const least = 80 / pixelsPerMicro(width);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((candidate) => candidate >= least);
  context.font = FONT;
  context.textBaseline = "top";
  for (let us = Math.max(0, Math.ceil(range.from / step) * step); us <= range.to; us += step) {
    const x = toX(us, width);
    context.fillStyle = theme.line;
    context.fillRect(x, 0, 1, height);
    context.fillStyle = theme.faint;
    context.fillText(micros(us).replace(".0 ", " "), x + 3, 3);
  }
}

/** Draw values as steps, each up to the next. */
function drawSteps(context, points, most, top, height, width, colour) {
  const y = (value) => top + height - (value / most) * (height - 4);
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(marginOf(width), top + height);
  const first = Math.max(0, firstAbove(points, range.from, (point) => point[0]) - 1);
  let last = null, highest = 0, level = top + height;
  for (let at = first; at < points.length && points[at][0] <= range.to; at += 1) {
    const x = Math.max(marginOf(width), Math.round(toX(points[at][0], width)));
    if (x !== last && last !== null) {
      context.lineTo(last, level);
      context.lineTo(last, y(highest));
      level = y(points[at - 1][1]);
      context.lineTo(last, level);
      highest = 0;
    }
    highest = Math.max(highest, points[at][1]);
    last = x;
  }
  if (last === null) return;
  const end = points[Math.min(firstAbove(points, range.to, (point) => point[0]), points.length) - 1];
  context.lineTo(last, level);
  context.lineTo(last, y(highest));
  context.lineTo(last, y(end[1]));
  context.lineTo(width, y(end[1]));
  context.lineTo(width, top + height);
  context.fill();
}
const valueAt = (points, us) => points[firstAbove(points, us, (point) => point[0]) - 1]?.[1] ?? 0;

function showTimeline() {
  const canvas = get("lanes");
  const AXIS = 20, HEADING = 20, LANE = 26, COUNTER = 34, GAP = 3;
  const streams = report.chosen.schedule.streams;
  const tracks = []; // from top to bottom: headings, lanes, counters
  let bottom = AXIS;
  const add = (track) => {
    tracks.push({ ...track, top: bottom });
    bottom += track.height;
  };
  for (const process of processes) {
    add({ kind: "heading", name: process.name, height: HEADING });
    process.lanes.forEach((lane, number) => add({ kind: "lane", ...lane, number, process, height: LANE }));
    for (const [name, { of, points }] of process.counters) {
      if (of === "shares asked for") {
        const most = points.reduce((highest, point) => Math.max(highest, point[1]), 1);
        add({ kind: "counter", name, points, most, height: COUNTER });
      }
    }
  }
  canvas.style.height = `${bottom + 6}px`;
  const laneOf = (process, number) => tracks.find((track) => track.process === process && track.number === number);

  const drawLane = (context, track, width) => {
    const { slices } = track;
    const start = Math.max(0, firstAbove(slices, range.from, (slice) => slice.start) - 1);
    const top = track.top + GAP, height = track.height - 2 * GAP;
    let covered = -Infinity; // slices that share a pixel are drawn once
    for (let at = start; at < slices.length && slices[at].start <= range.to; at += 1) {
      const slice = slices[at];
      const left = Math.max(marginOf(width), toX(slice.start, width)), right = Math.max(toX(slice.end, width), left + 1);
      if (right <= marginOf(width) || right - covered < 1) continue;
      covered = right;
      const path = track.number >= streams;
      context.fillStyle = path ? theme.critical : streamColour(track.number);
      context.fillRect(left, top, Math.max(right - left - 0.5, 0.5), height);
      if (right - left < 4) continue;
      if (!path && slice.slowdown > 1.01) {
        const lost = (right - left) * (1 - 1 / slice.slowdown);
        context.fillStyle = theme.shade;
        context.fillRect(right - lost, top, lost - 0.5, height);
      }
      context.fillStyle = path ? "#fff" : theme["node-ink"];
      label(context, slice.name, left + 3, top + height / 2, right - left - 6);
      if (slice.name === selection.op?.name) {
        context.strokeStyle = theme.ink;
        context.lineWidth = 2;
        context.strokeRect(left, top, right - left - 0.5, height);
      }
    }
  };

  const drawArrows = (context, process, width) => {
    const seen = process.arrows.filter((arrow) => arrow.from.at <= range.to && arrow.to.at >= range.from);
    if (seen.length > 1500) return; // they would hide everything, and say nothing
    context.strokeStyle = theme.faint;
    context.lineWidth = 1;
    context.beginPath();
    for (const { from, to } of seen) {
      const source = laneOf(process, from.lane), sink = laneOf(process, to.lane);
      const down = sink.top > source.top;
      const [x1, x2] = [toX(from.at, width), toX(to.at, width)];
      const [y1, y2] = [source.top + (down ? LANE - GAP : GAP), sink.top + (down ? GAP : LANE - GAP)];
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1, (y1 + y2) / 2, x2, (y1 + y2) / 2, x2, y2);
      context.moveTo(x2 - 3, y2 + (down ? -5 : 5));
      context.lineTo(x2, y2);
      context.lineTo(x2 + 3, y2 + (down ? -5 : 5));
    }
    context.stroke();
  };

  const surface = surfaceOf(canvas, (context, width, height) => {
    drawAxis(context, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(marginOf(width), AXIS, width - marginOf(width), height);
    context.clip();
    for (const track of tracks) {
      if (track.kind === "lane") drawLane(context, track, width);
      if (track.kind === "counter") {
        drawSteps(context, track.points, track.most, track.top + 2, track.height - 4, width, theme.line);
        const full = track.top + track.height - 2 - (track.height - 8) / track.most;
        context.fillStyle = theme.critical;
        context.fillRect(marginOf(width), full, width, 1);
      }
    }
    if (get("arrows").checked) for (const process of processes) drawArrows(context, process, width);
    context.restore();
    for (const track of tracks) {
      context.fillStyle = track.kind === "heading" ? theme.ink : theme.faint;
      label(context, track.name, 6, track.top + track.height / 2, track.kind === "heading" ? width : marginOf(width) - 6);
    }
  });

  const sliceAt = (x, y) => {
    const track = tracks.find((each) => y >= each.top && y < each.top + each.height);
    if (x < marginOf(canvas.clientWidth) || !track) return {};
    const us = toMicros(x, canvas.clientWidth);
    const slice = track.slices?.[firstAbove(track.slices, us, (each) => each.start) - 1];
    return { track, us, slice: slice && slice.end >= us - 1 / pixelsPerMicro(canvas.clientWidth) ? slice : undefined };
  };
  const inTime = [...ops].sort((a, b) => a.start - b.start);
  interactive(canvas, timeView(canvas, {
    hover(x, y) {
      const { track, us, slice } = sliceAt(x, y);
      if (track?.kind === "counter") return [`${track.name} asked for: ${share(valueAt(track.points, us))}`, `at ${micros(us)}`];
      if (!slice) return null;
      const slowed = slice.slowdown > 1.01 ? [`${times(slice.slowdown)} as long as alone: others run beside it`] : [];
      return [slice.name, opNamed.get(slice.name).target, `${micros(slice.start)} to ${micros(slice.end)}, ${micros(slice.end - slice.start)}`, ...slowed];
    },
    pick(x, y) {
      const { slice } = sliceAt(x, y);
      select(slice ? opNamed.get(slice.name) : null, { reveal: false });
    },
    step(by) {
      const at = inTime.indexOf(selection.op);
      select(inTime[Math.min(Math.max(at + by, 0), inTime.length - 1)]);
    },
  }));
  get("arrows").addEventListener("change", () => surface.redraw());
  range.listeners.push(() => surface.redraw());
  selection.listeners.push((op, reveal) => {
    if (op && reveal && (op.start < range.from || op.start > range.to)) {
      const half = (range.to - range.from) / 2;
      showRange(op.start - half, op.start + half);
    }
    surface.redraw();
  });
}
