"use strict";

/** From the whole model down to the part that is shown: the address chooses one as ?part=2 or 2.0. */
const way = [JSON.parse(document.getElementById("data").textContent)];
const numbers = []; // of the parts on the way
for (const number of (new URLSearchParams(location.search).get("part") ?? "").split(".").filter(Boolean).map(Number)) {
  const part = way.at(-1).parts[number];
  if (!part) break; // what is not there is not shown
  way.push(part);
  numbers.push(number);
}

/** The data of the page, from its JSON: the report, its trace events, coordinates of ops, and its parts. */
const { report, trace, places, parts } = way.at(-1);
const scheduled = Boolean(report.chosen && report.graph && report.summary && trace.length);

const critical = new Set(scheduled ? report.summary.critical_path.ops : []);

/** Processes of the trace: {name, lanes: [{name, slices}], arrows, marks, counters: {name: {of, points: [[µs, value]]}}}. */
const processes = (() => {
  const found = new Map();
  const of = (event) => {
    if (!found.has(event.pid)) {
      found.set(event.pid, { name: "", lanes: new Map(), arrows: new Map(), marks: [], counters: new Map() });
    }
    return found.get(event.pid);
  };
  const lane = (event) => {
    const { lanes } = of(event);
    if (!lanes.has(event.tid)) lanes.set(event.tid, { name: "", slices: [] });
    return lanes.get(event.tid);
  };
  for (const event of trace) {
    if (event.ph === "M" && event.name === "process_name") of(event).name = event.args.name;
    if (event.ph === "M" && event.name === "thread_name") lane(event).name = event.args.name;
    if (event.ph === "X") {
      const { name, tid, ts, dur, args } = event;
      lane(event).slices.push({ name, lane: tid, start: ts, end: ts + dur, slowdown: args.slowdown });
    }
    if (event.ph === "i") of(event).marks.push({ name: event.name, at: event.ts });
    if (event.ph === "s") of(event).arrows.set(event.id, { from: { lane: event.tid, at: event.ts } });
    if (event.ph === "f") of(event).arrows.get(event.id).to = { lane: event.tid, at: event.ts };
    if (event.ph === "C") {
      const { counters } = of(event);
      for (const [name, value] of Object.entries(event.args)) {
        if (!counters.has(name)) counters.set(name, { of: event.name, points: [] });
        counters.get(name).points.push([event.ts, value]);
      }
    }
  }
  for (const process of found.values()) {
    const tids = [...process.lanes.keys()].sort((a, b) => a - b);
    process.lanes = tids.map((tid) => process.lanes.get(tid));
    process.arrows = [...process.arrows.values()];
    for (const { from, to } of process.arrows) for (const end of [from, to]) end.lane = tids.indexOf(end.lane);
    process.lanes.forEach(({ slices }, lane) => {
      for (const slice of slices) slice.lane = lane;
      slices.sort((a, b) => a.start - b.start);
    });
  }
  return [...found.values()];
})();

/** From the start of the run to its last end, µs. */
const makespan = Math.max(0, ...processes.map((p) => p.lanes.reduce((most, lane) => Math.max(most, lane.slices.at(-1)?.end ?? 0), 0)));

/** Ops in launch order, with their data. */
const ops = !scheduled ? [] : report.chosen.schedule.launches.map((launch, at) => {
  const { target, source, flops, bytes_read, bytes_written } = report.graph.ops[launch.op];
  const cost = report.costs[launch.op];
  return {
    at, name: launch.op, target, source, stream: launch.stream, waits: launch.waits, flops, bytes: bytes_read + bytes_written,
    cost: cost.duration_us, sm: cost.sm_share, bandwidth: cost.bandwidth_share, start: NaN, slowdown: 1,
    slack: report.summary.slack_us[launch.op], critical: critical.has(launch.op),
    why: report.explanation?.placements[launch.op] ?? "",
    text: `${launch.op}\n${target}\n${source}`.toLowerCase(),
  };
});
const opNamed = new Map(ops.map((op) => [op.name, op]));
if (scheduled) {
  const streams = report.chosen.schedule.streams;
  for (const { slices } of processes[0].lanes.slice(0, streams)) {
    for (const slice of slices) Object.assign(opNamed.get(slice.name), { start: slice.start, slowdown: slice.slowdown });
  }
}

/** The selected op; views are notified of a change. */
const selection = { op: null, listeners: [] };
function select(op, { reveal = true } = {}) {
  selection.op = op;
  for (const listener of selection.listeners) listener(op, reveal);
}
