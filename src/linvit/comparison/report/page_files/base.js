// What everything below uses: the data, elements made without markup from files, numbers as people write them.
const D = JSON.parse(document.getElementById("data").textContent);
const state = { setting: 0, patch: "", chip: -1, size: 0, hidden: new Set() };
const listeners = [];
const byId = (id) => document.getElementById(id);
const changed = () => listeners.forEach((draw) => draw());

// el("p", {class: "x"}, "text", child): text becomes text nodes, so nothing in a file is ever read as markup.
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else node.setAttribute(name, value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== "") node.append(child);
  return node;
}

const minus = (text) => text.replace(/-/g, "−");
const known = (x) => x !== null && x !== undefined;
function three(x) {
  if (!known(x)) return "–";
  const size = Math.abs(x);
  if (size && (size < 1e-3 || size >= 1e5)) return minus(x.toExponential(1));
  return minus(x.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3 }));
}
function short(x) {
  if (!known(x)) return "–";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(x) >= unit) return three(x / unit) + " " + letter;
  return three(x);
}
const whole = (x) => (known(x) ? Math.round(x).toLocaleString("en") : "–");
const percent = (x, digits = 1) => (known(x) ? x.toFixed(digits) : "–");
const signed = (x, digits = 1) => (known(x) ? minus((x >= 0 ? "+" : "") + x.toFixed(digits)) : "–");
const bounds = (ends, digits = 1, write = signed) => (ends ? `[${write(ends[0], digits)}, ${write(ends[1], digits)}]` : "");
const bytes = (x) => (!known(x) ? "–" : x >= 2 ** 30 ? three(x / 2 ** 30) + " GiB" : three(x / 2 ** 20) + " MiB");
const seconds = (x) => (!known(x) ? "–" : x >= 5400 ? three(x / 3600) + " h" : x >= 90 ? three(x / 60) + " min" : three(x) + " s");
const listed = (data) => JSON.stringify(data, null, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inner) => `[${inner.replace(/\s*\n\s*/g, " ")}]`);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// One colour and one marker for a candidate, everywhere.
const hueOf = (candidate) => { const [hue] = D.styles[candidate] || [-1]; return hue < 0 ? "var(--ink)" : `var(--h${hue})`; };
const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (r) => polygon([[-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]], r),
  (r) => polygon([[0, -1.15], [1.08, 0.8], [-1.08, 0.8]], r),
  (r) => polygon([[0, -1.25], [1.1, 0], [0, 1.25], [-1.1, 0]], r),
  (r) => polygon([[0, 1.15], [1.08, -0.8], [-1.08, -0.8]], r),
  (r) => polygon([[-0.38, -1.1], [0.38, -1.1], [0.38, -0.38], [1.1, -0.38], [1.1, 0.38], [0.38, 0.38], [0.38, 1.1], [-0.38, 1.1], [-0.38, 0.38], [-1.1, 0.38], [-1.1, -0.38], [-0.38, -0.38]], r),
  (r) => star(5, 1.35, 0.58, r),
  (r) => star(3, 1.1, 0.95, r),
  (r) => polygon([[-1.05, -1.05], [-0.5, -1.05], [0, -0.5], [0.5, -1.05], [1.05, -1.05], [1.05, -0.5], [0.5, 0], [1.05, 0.5], [1.05, 1.05], [0.5, 1.05], [0, 0.5], [-0.5, 1.05], [-1.05, 1.05], [-1.05, 0.5], [-0.5, 0], [-1.05, -0.5]], r),
];
function polygon(corners, r) {
  return "M" + corners.map(([x, y]) => `${(x * r).toFixed(2)},${(y * r).toFixed(2)}`).join("L") + "Z";
}
function star(tips, outer, inner, r) {
  const at = (i) => { const a = (Math.PI * i) / tips - Math.PI / 2, d = i % 2 ? inner : outer; return [Math.cos(a) * d, Math.sin(a) * d]; };
  return polygon([...Array(2 * tips).keys()].map(at), r);
}
function marker(candidate, r = 5, hollow = false) {
  const shape = SHAPES[(D.styles[candidate] || [0, 0])[1] % SHAPES.length], colour = hueOf(candidate);
  return svg("path", { d: shape(r), style: { fill: hollow ? "var(--paper)" : colour, stroke: hollow ? colour : "var(--paper)", "stroke-width": hollow ? 1.75 : 0.75 } });
}
const badge = (candidate) => svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" }, marker(candidate, 4.6));

// Rows and speeds that the controls leave.
const patches = () => [...new Set(D.rows.filter((row) => row.setting === state.setting).map((row) => row.patch))].sort((a, b) => a - b);
const rowsNow = () => D.rows.filter((row) => row.setting === state.setting && (state.patch === "" || row.patch === +state.patch));
const rowsShown = () => rowsNow().filter((row) => !state.hidden.has(row.candidate));
const speedOf = (row, what, many) => row.speeds.find((speed) => speed.chip === state.chip && speed.what === what && speed.many === many);
function timingOf(row, what, many, size = state.size) {
  const speed = speedOf(row, what, many);
  const found = speed && speed.ladder.find((timing) => timing[0] === size);
  if (!found) return null;
  const [, tokens, batch, median, low, high, ips, peak, ratio, note, how] = found;
  return { tokens, batch, median, low, high, ips, peak, ratio, note, how };
}
const hollowAt = (row) => row.teacher || (state.patch === "" && row.patch !== patches()[0]);
const called = (row) => (state.patch === "" && patches().length > 1 ? `${row.name} p${row.patch}` : row.name);

let printing = false; // on paper, charts are drawn for its width
const spaceOf = (holder) => (!printing ? Math.max(280, holder.clientWidth) : holder.closest(".pair") ? 345 : 700);

function choice(label, options, value, choose, id) {
  const select = el("select", { id, onchange: () => choose(select.value) }, options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) ? "" : null }, text)));
  return el("label", {}, label, select);
}
