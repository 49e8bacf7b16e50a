/** The difference between memory in use and memory allocated, and what neither includes. */
function counted(planned, used) {
  const { workspace_bytes: workspaces } = report.explanation.memory;
  return "The area is what ops have made and others still need at the times of the timeline above, outputs to the end: " +
    `${used}. The line is what is taken for that, ${size(planned)}, the memory in the summary: whatever the clock does, memory ` +
    "stays taken until its users are proven to be done, streams share no blocks, and an arena is taken as a whole. " +
    "Weights, inputs, copies of inputs and outputs and libraries' workspaces are in neither" +
    `${workspaces ? `; those of cuBLAS are ${size(workspaces)} at most` : ""}.`;
}

/** Memory in use over time, on the time axis of the timeline, and the storages live at the peak. */
function showMemory() {
  const canvas = get("used");
  const planned = report.explanation.memory.bytes;
  const series = processes.map((process) => ({ name: process.name, points: process.counters.get("bytes")?.points ?? [] }));
  const peak = ({ points }) => points.reduce((highest, point) => Math.max(highest, point[1]), 0);
  const most = Math.max(planned, ...series.map(peak), 1);
  get("counted").textContent = counted(planned, series.map((each) => `${size(peak(each))} at most as ${each.name}`).join(", "));
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
    context.fillStyle = theme.ink;
    context.fillRect(0, height - (planned / most) * (height - 24), width, 1);
    context.restore();
    context.font = FONT;
    context.fillStyle = theme.faint;
    context.textBaseline = "top";
    context.fillText(size(most), 6, 26);
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
