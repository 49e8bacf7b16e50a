/** Speedup, lost time, advice and versions. */

const MODES = {
  plain: "the plain model", "one stream": "one op after another, uncaptured", streams: "ops on CUDA streams, uncaptured",
  threads: "CPU threads", "cuda graph": "a CUDA graph", "graph breaks": "parts between graph breaks",
  sections: "CUDA graphs, and between them the ops that none can hold",
  "forward and backward": "a forward and a backward, each scheduled for itself",
  "dry run": "nothing: this is a dry run", "not run yet": "nothing yet",
};

function headline() {
  const gain = report.explanation?.gains[0];
  if (!gain) return scheduled ? "No gain from streams: one stream was chosen" : `Runs as ${MODES[report.mode] ?? report.mode}`;
  return `${times(gain.times)} the speed of ${gain.against}, ${gain.measured ? "measured" : "predicted"}`;
}

function facts() {
  const found = [["runs as", MODES[report.mode] ?? report.mode]];
  if (report.captured_share !== null) {
    const rest = report.mode === "sections" ? "what no graph holds as predicted" : "what runs between them is not timed";
    found.push(["captured", `${share(report.captured_share)} of the time of its parts, each run once; ${rest}`]);
  }
  if (report.ended) found.push(["ends because", report.ended]);
  const { chosen, explanation, summary } = report;
  if (chosen) {
    found.push(["schedule", `${chosen.schedule.policy}, ${several(chosen.schedule.streams, "stream")}`]);
    found.push(["predicted", micros(chosen.predicted_us)]);
    if (chosen.measured_us !== null) found.push(["measured", micros(chosen.measured_us)]);
  }
  for (const gain of explanation?.gains ?? []) {
    found.push(["gain", `${times(gain.times)} ${gain.against} (${micros(gain.other_us)}), ${gain.measured ? "measured" : "predicted"}`]);
  }
  const spread = explanation?.spread;
  if (spread) {
    const gains = spread.times ? `, ${times(spread.times[0])} to ${times(spread.times[1])} one stream` : "";
    found.push(["uncertain", `${fixed(spread.us[0])} to ${micros(spread.us[1])}${gains}, if ops take ${share(spread.error)} less or more (${spread.costs} costs)${spread.times ? `; at least ${share(spread.realized)} of the gain comes true` : ""}`]);
  }
  for (const bound of explanation?.ceilings.slice(0, 3) ?? []) {
    found.push(["at most", `${times(bound.times)}: ${bound.why}, ${micros(bound.us)}`]);
  }
  if (summary && report.graph) {
    found.push(["graph", `${several(Object.keys(report.graph.ops).length, "op")}, up to ${summary.width} independent, ${several(summary.regions.length, "region")} of branches`]);
    const { work_us: work, us } = summary.critical_path;
    found.push(["work", `${micros(summary.work_us)}, ${micros(work)} of it on the critical path${us > work ? `, ${micros(us)} with its gaps` : ""}`]);
  }
  if (explanation) {
    const { bytes, sequential_bytes: one } = explanation.memory;
    found.push(["memory", `${size(bytes)} at most${one ? `, ${times(bytes / one)} one stream (${size(one)})` : ""}, weights and inputs not included`]);
    if (explanation.kept_out) found.push(["budget", `${explanation.kept_out.schedule} would take ${micros(explanation.kept_out.predicted_us)}: ${explanation.kept_out.why}`]);
  }
  for (const refusal of report.refusals.slice(0, 20)) {
    found.push(["refused", `${refusal.choice}: ${refusal.reason}${refusal.op ? ` (op ${refusal.op})` : ""}`]);
  }
  if (report.refusals.length > 20) found.push(["refused", `${several(report.refusals.length - 20, "more")}`]);
  return found;
}

function meterOf(part) {
  const value = Math.max(0, Math.min(1, part));
  return make("span", {}, make("meter", { value, max: 1, "aria-hidden": "true" }), ` ${share(part)}`);
}

function showSummary() {
  const name = [way[0].report.model, ...(numbers.length ? [report.half || `part ${numbers.join(".")}`] : [])].join(", ");
  document.title = `${name} – autostream report`;
  get("model").textContent = name;
  get("signature").textContent = report.signature;
  get("headline").textContent = headline();
  fill(get("facts"), facts());
  const { explanation } = report;
  if (explanation?.reasons.length) {
    const rows = explanation.reasons.map((reason) => [fixed(reason.us), meterOf(reason.share), reason.cause, reason.why]);
    get("reasons").append(
      make("h3", {}, `Why ${explanation.explained}${explanation.kept_out ? ", which the memory budget keeps out," : ""} is not faster`),
      make("p", { className: "hint" }, `${micros(explanation.ideal_us)} if its streams were always busy, and beyond that`),
      make("div", { className: "scroll" }, tableOf([["µs", "number"], ["lost"], ["cause"], ["which", "wrap"]], rows)));
  }
  if (explanation?.advice.length) {
    get("advice").append(make("h3", {}, "What to try"), make("ul", {}, ...explanation.advice.map((advice) => make("li", {}, advice))));
  }
  if (explanation?.companies.length) {
    const rows = explanation.companies.map((company) => {
      const beside = Object.keys(company.beside);
      return [fixed(company.shared_us), company.op, String(company.stream), beside.slice(0, 5).join(", ") + (beside.length > 5 ? ` +${beside.length - 5}` : "")];
    });
    get("companies").append(
      make("h3", {}, "Side by side, as predicted"),
      make("div", { className: "scroll" }, tableOf([["µs", "number"], ["op", "name"], ["stream", "number"], ["beside", "wrap"]], rows)));
  }
}

/** A link to a part by its path of numbers; an empty path is the whole model. */
const linkTo = (place, said) => make("a", { href: place.length ? `?part=${place.join(".")}` : "?" }, said);

/** Links of a part to its parents and siblings. */
function showWay() {
  if (!numbers.length) return;
  const above = numbers.slice(0, -1), number = numbers.at(-1);
  const beside = [number - 1, number + 1].filter((other) => way.at(-2).parts[other]).map((other) => [...above, other]);
  get("beside").hidden = false;
  get("beside").append(
    linkTo(above, above.length ? `All of part ${above.join(".")}` : `All of ${way[0].report.model}`),
    ...beside.map((place) => linkTo(place, way.at(-2).parts[place.at(-1)].report.half || `Part ${place.join(".")}`)));
}

/** The parts of a model: why each ends, how it runs and how long; or forward and backward. */
function showParts() {
  if (!parts.length) return;
  const halves = report.mode === "forward and backward";
  const columns = [...(halves ? [["half"]] : [["part", "number"], ["ends because", "wrap"]]), ["runs as", "wrap"], ["ops", "number"], ["measured µs", "number"], ["predicted µs", "number minor"], ["share", "minor"]];
  const time = ({ report: { chosen } }) => chosen?.measured_us ?? chosen?.predicted_us ?? 0;
  const total = parts.reduce((sum, part) => sum + time(part), 0);
  const rows = parts.map((part, number) => {
    const { chosen, graph, mode, refusals, ended, half } = part.report;
    const place = [...numbers, number];
    const why = mode === "plain" && refusals.length ? `: ${refusals[0].reason}` : "";
    return [
      linkTo(place, half || place.join(".")), ...(halves ? [] : [ended || "the model returns"]), `${MODES[mode] ?? mode}${why}`, graph ? String(Object.keys(graph.ops).length) : "",
      fixed(chosen?.measured_us ?? NaN), fixed(chosen?.predicted_us ?? NaN), chosen && total ? meterOf(time(part) / total) : "",
    ];
  });
  get("parts").append(
    make("h3", {}, halves ? "Forward and backward" : "Parts"),
    make("p", { className: "hint" }, "Each is scheduled for itself: its name leads to its timeline, graph and ops. Shares are of the time of all, each run once, as measured, or else as predicted."),
    make("div", { className: "scroll" }, tableOf(columns, rows)));
}

function showCandidates() {
  const columns = [["policy"], ["streams", "number"], ["captured", "minor"], ["waits", "number minor"], ["memory", "number"], ["predicted µs", "number"], ["measured µs", "number"], ["time", "minor"], ["remark", "wrap"]];
  const time = (candidate) => candidate.measured_us ?? candidate.predicted_us;
  const most = Math.max(...report.candidates.map(time));
  const rows = report.candidates.map((candidate) => [
    candidate.schedule.policy, String(candidate.schedule.streams), candidate.captured ? "CUDA graph" : "no", String(candidate.schedule.waits),
    size(candidate.memory_bytes), fixed(candidate.predicted_us), candidate.measured_us === null ? "" : fixed(candidate.measured_us),
    make("meter", { value: most ? time(candidate) / most : 0, max: 1, "aria-hidden": "true" }), candidate.chosen ? "chosen" : candidate.refusal,
  ]);
  get("compared").append(tableOf(columns, rows, report.candidates.map((candidate) => (candidate.chosen ? "chosen" : ""))));
}

function showEnvironment() {
  const { profile, seconds, versions } = report;
  const found = [];
  if (profile) {
    const peaks = Object.entries(profile.flops).map(([dtype, peak]) => `${dtype} ${fixed(peak / 1e6)}`).join(", ");
    found.push(
      ["device", `${profile.name} (profile: ${profile.source})`],
      ["multiprocessors", String(profile.multiprocessors)],
      ["bandwidth", `${fixed(profile.bandwidth / 1e3, 0)} GB/s`],
      ["TFLOP/s", peaks],
      ["edges", `${fixed(profile.same_stream_edge_us, 2)} µs within a stream, ${fixed(profile.cross_stream_edge_us, 2)} µs between two`],
      ["fork, join", `${fixed(profile.fork_us, 2)} µs, ${fixed(profile.join_us, 2)} µs`],
    );
  }
  for (const [stage, took] of Object.entries(seconds)) found.push(["prepared in", `${stage} ${fixed(took, 2)} s`]);
  for (const [name, version] of Object.entries(versions)) found.push(["with", `${name} ${version}`]);
  fill(get("device"), found);
}
