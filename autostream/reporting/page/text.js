/** Numbers and elements. Strings of a model are set as text, never as markup. */
const formats = [0, 1, 2].map((digits) =>
  new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const fixed = (number, digits = 1) => (Number.isFinite(number) ? formats[digits].format(number) : "");
const micros = (us) => `${fixed(us)} µs`;
const share = (part) => (Number.isFinite(part) ? `${Math.round(100 * part)} %` : "");
const times = (ratio) => `${fixed(ratio, 2)}×`;
const several = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
function size(bytes) {
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= factor) return `${fixed(bytes / factor)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

/** A source line without the directories of its file. */
const brief = (source) => source.replace(/^.*[/\\](?=[^/\\]*?:\d+: )/, "");

const get = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Terms and descriptions, as children of a <dl>; consecutive equal terms appear once. */
function fill(list, pairs) {
  let last = null;
  list.replaceChildren(...pairs.flatMap(([term, said]) => {
    const named = term === last ? "" : term;
    last = term;
    return [make("dt", {}, named), make("dd", {}, said)];
  }));
}

/** A table; columns are [title, class], cells strings or elements. */
function tableOf(columns, rows, rowClasses = []) {
  const cell = (tag, content, column) => make(tag, { className: column[1] ?? "", ...(tag === "th" ? { scope: "col" } : {}) }, content);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map((column) => cell("th", column[0], column)))),
    make("tbody", {}, ...rows.map((row, at) =>
      make("tr", { className: rowClasses[at] ?? "" }, ...row.map((content, index) => cell("td", content, columns[index]))))));
}
