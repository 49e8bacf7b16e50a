/** All ops, sorted and filtered; only visible rows are in the document. */
function showTable() {
  const ROW = 28, SPARE = 4; // each row costs layout and paint in every frame of a scroll
  const columns = [
    { title: "#", key: (op) => op.at, show: (op) => String(op.at), kind: "number" },
    { title: "op", key: (op) => op.name, show: (op) => op.name, kind: "name" },
    { title: "target", key: (op) => op.target, show: (op) => op.target, kind: "name minor" },
    { title: "stream", key: (op) => op.stream, show: (op) => String(op.stream), kind: "number" },
    { title: "start µs", key: (op) => op.start, show: (op) => fixed(op.start), kind: "number" },
    { title: "cost µs", key: (op) => op.cost, show: (op) => fixed(op.cost), kind: "number" },
    { title: "slowed", key: (op) => op.slowdown, show: (op) => times(op.slowdown), kind: "number minor" },
    { title: "SMs", key: (op) => op.sm, show: (op) => share(op.sm), kind: "number minor" },
    { title: "slack µs", key: (op) => op.slack, show: (op) => fixed(op.slack), kind: "number" },
    { title: "waits", key: (op) => op.waits.length, show: (op) => String(op.waits.length), kind: "number minor" },
    { title: "source", key: (op) => op.source, show: (op) => brief(op.source), kind: "name minor" },
  ];
  const order = { column: columns[0], down: false };
  const container = get("rows");
  const body = make("tbody");
  const heads = columns.map((column) => {
    const button = make("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      order.down = order.column === column ? !order.down : false;
      order.column = column;
      update();
    });
    return make("th", { scope: "col", className: column.kind }, button);
  });
  container.append(make("table", { "aria-rowcount": String(ops.length) }, make("thead", {}, make("tr", {}, ...heads)), body));
  let rows = ops;

  const rowOf = (op, at) => {
    const row = make("tr", { "aria-rowindex": String(at + 1), "aria-selected": String(op === selection.op) },
      ...columns.map((column) => make("td", { className: column.kind }, column.show(op))));
    row.addEventListener("click", () => select(op));
    return row;
  };
  const spacer = (height) => {
    const cell = make("td", { colSpan: columns.length });
    cell.style.height = `${height}px`;
    return make("tr", { className: "spacer", "aria-hidden": "true" }, cell);
  };
  let shown = new Map(); // rows in sight, by op: scrolling makes only those that come into it
  const draw = (anew = true) => {
    const first = Math.max(0, Math.floor(container.scrollTop / ROW) - SPARE);
    const last = Math.min(rows.length, Math.ceil((container.scrollTop + container.clientHeight) / ROW) + SPARE);
    const known = anew ? new Map() : shown;
    shown = new Map(rows.slice(first, last).map((op, at) => [op, known.get(op) ?? rowOf(op, first + at)]));
    body.replaceChildren(spacer(first * ROW), ...shown.values(), spacer((rows.length - last) * ROW));
  };
  const update = () => {
    const wanted = get("filter").value.trim().toLowerCase(), stream = get("stream").value;
    rows = ops.filter((op) =>
      op.text.includes(wanted) && (stream === "" || op.stream === Number(stream)) && (!get("critical").checked || op.critical));
    const { key } = order.column, sign = order.down ? -1 : 1;
    rows.sort((a, b) => {
      const [one, other] = [key(a), key(b)];
      return one < other ? -sign : one > other ? sign : a.at - b.at;
    });
    columns.forEach((column, at) => {
      heads[at].setAttribute("aria-sort", column !== order.column ? "none" : order.down ? "descending" : "ascending");
    });
    get("shown").textContent = `${rows.length.toLocaleString("en-US")} of ${several(ops.length, "op")}`;
    container.scrollTop = 0;
    draw();
  };
  const reveal = (op) => {
    const at = rows.indexOf(op);
    const room = container.clientHeight - 2 * ROW;
    if (at >= 0 && (at * ROW < container.scrollTop || at * ROW > container.scrollTop + room)) {
      container.scrollTop = at * ROW - room / 2;
    }
  };
  let asked = false;
  container.addEventListener("scroll", () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw(false);
    });
  });
  container.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || event.target !== container || !rows.length) return;
    event.preventDefault();
    select(rows[Math.min(Math.max(rows.indexOf(selection.op) + by, 0), rows.length - 1)]);
  });
  selection.listeners.push((op) => {
    reveal(op);
    draw();
  });
  const { streams } = report.chosen.schedule;
  for (let stream = 0; stream < streams; stream += 1) get("stream").append(make("option", { value: String(stream) }, String(stream)));
  for (const control of ["filter", "stream", "critical"]) get(control).addEventListener("input", update);
  new ResizeObserver(() => draw()).observe(container);
  update();
}
