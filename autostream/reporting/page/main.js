/** All views, and the details of the selected op. */
function showDetails(op) {
  get("details").hidden = !op;
  if (!op) return;
  fill(get("selected"), [
    ["op", op.name],
    ["target", op.target],
    ...(op.source ? [["source", op.source]] : []),
    ["stream", `${op.stream}${op.why ? `: ${op.why}` : ""}`],
    ["starts at", `${micros(op.start)}, as predicted`],
    ["takes", `${micros(op.cost)} alone${op.slowdown > 1.01 ? `, ${times(op.slowdown)} that beside others` : ""}`],
    ["fills", `${share(op.sm)} of the multiprocessors, ${share(op.bandwidth)} of the bandwidth`],
    ["work", `${fixed(op.flops / 1e6)} MFLOP, ${size(op.bytes)} read and written`],
    ["slack", `${micros(op.slack)}${op.critical ? ", on the critical path" : ""}`],
    ["waits for", op.waits.length ? op.waits.join(", ") : "nothing on other streams"],
  ]);
}

showWay();
showSummary();
showParts();
showEnvironment();
if (scheduled) {
  showTimeline();
  showMemory();
  showGraph();
  showTable();
  showCandidates();
  showRange(0, makespan);
  selection.listeners.push(showDetails);
  get("close").addEventListener("click", () => select(null));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") select(null);
  });
} else {
  for (const section of document.querySelectorAll('[data-needs="schedule"]')) section.hidden = true;
  for (const { hash } of [...document.querySelectorAll('nav a[href^="#"]')]) {
    if (document.querySelector(hash).hidden) document.querySelector(`nav a[href="${hash}"]`).hidden = true;
  }
}
