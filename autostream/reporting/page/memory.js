/** Memory in use, on the time axis of the timeline, and what holds it. */
function showMemory() {
  const canvas = get("used");
  const series = processes.map((process) => ({ name: process.name, points: process.counters.get("bytes")?.points ?? [] }));
  const most = series.flatMap(({ points }) => points).reduce((highest, point) => Math.max(highest, point[1]), 1);
  const surface = surfaceOf(canvas, (context, width, height) => {
    drawAxis(context, width, height);
    context.save();
    context.beginPath();
    context.rect(marginOf(width), 0, width - marginOf(width), height);
    context.clip();
    series.forEach(({ points }, number) => {
      context.globalAlpha = series.length > 1 ? 0.6 : 1;
      drawSteps(context, points, most, 20, height - 20, width, streamColour(number));
    });
    context.restore();
    context.font = FONT;
    context.fillStyle = theme.faint;
    context.textBaseline = "top";
    context.fillText(size(most), 6, 20);
    context.textBaseline = "bottom";
    context.fillText("0 B", 6, height - 2);
  });
  interactive(canvas, timeView(canvas, {
    hover(x) {
      const us = toMicros(x, canvas.clientWidth);
      return x < marginOf(canvas.clientWidth) ? null : [`at ${micros(us)}`, ...series.map(({ name, points }) => `${name}: ${size(valueAt(points, us))}`)];
    },
    pick: () => select(null),
  }));
  range.listeners.push(() => surface.redraw());

  const { holders } = report.explanation.memory;
  if (!holders.length) return;
  const rows = holders.slice(0, 12).map((holder) => [size(holder.bytes), holder.storage, holder.pool, holder.op, brief(holder.source)]);
  get("holders").append(
    make("h3", {}, `What holds the memory when most is in use${rows.length < holders.length ? `, the ${rows.length} largest of ${holders.length}` : ""}`),
    make("div", { className: "scroll" }, tableOf([["size", "number"], ["storage", "name"], ["in"], ["made by", "name minor"], ["source", "name minor"]], rows)));
}
