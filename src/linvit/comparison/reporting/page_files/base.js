// What everything below uses: the data, elements made without markup from files, numbers as people write them.
const D = JSON.parse(document.getElementById("data").textContent);
const state = { setting: 0, patch: "", chip: -1, size: 0, hidden: new Set() };
const listeners = []; // drawn again, in order, when the state changes
const byId = (id) => document.getElementById(id);
const changed = () => listeners.forEach((draw) => draw());
const known = (x) => x !== null && x !== undefined;

// el("p", {class: "x"}, "text", child): text becomes text nodes, so nothing in a file is ever read as markup.
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (!known(value) || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, v]) => node.style.setProperty(key, v));
    else node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => known(child) && child !== ""));
  return node;
}

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const minus = (text) => text.replace(/-/g, "−");
const whole = (x) => (known(x) ? Math.round(x).toLocaleString("en") : "–");
const percent = (x, digits = 1) => (known(x) ? x.toFixed(digits) : "–");
const signed = (x, digits = 1) => (known(x) ? minus((x >= 0 ? "+" : "") + x.toFixed(digits)) : "–");
const range = (ends, write) => (ends ? `[${ends.map((end) => write(end)).join(", ")}]` : "");
const bounds = (ends) => range(ends, (x) => signed(x));
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
// Three digits; `even` keeps trailing zeros, for columns of numbers.
function three(x, even = false) {
  if (!known(x)) return "–";
  const size = Math.abs(x);
  if (size && (size < 1e-3 || size >= 1e5)) return minus(x.toExponential(1));
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const least = even ? digits : 0;
  return minus(x.toLocaleString("en", { minimumFractionDigits: least, maximumFractionDigits: digits }));
}
function short(x, even = false) {
  if (!known(x)) return "–";
  const [unit, letter] = UNITS.find(([size]) => Math.abs(x) >= size) || [1, ""];
  return `${three(x / unit, even)} ${letter}`.trim();
}
function bytes(x) {
  if (!known(x)) return "–";
  return x >= 2 ** 30 ? `${three(x / 2 ** 30)} GiB` : `${three(x / 2 ** 20)} MiB`;
}
function seconds(x) {
  if (!known(x)) return "–";
  return x >= 5400 ? `${three(x / 3600)} h` : x >= 90 ? `${three(x / 60)} min` : `${three(x)} s`;
}
// JSON with short lists on one line.
function listed(data) {
  const flat = (_, inner) => `[${inner.replace(/\s*\n\s*/g, " ")}]`;
  return JSON.stringify(data, null, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, flat);
}

// What the setting's models are judged by, and whether each image is right or wrong.
const metric = () => D.settings[state.setting].metric;
const byImage = () => D.settings[state.setting].by_image;

// Rows and speeds that the controls leave.
const inSetting = () => D.rows.filter((row) => row.setting === state.setting);
const patches = () => [...new Set(inSetting().map((row) => row.patch))].sort((a, b) => a - b);
const rowsNow = () => inSetting().filter((row) => state.patch === "" || row.patch === Number(state.patch));
const rowsShown = () => rowsNow().filter((row) => !state.hidden.has(row.candidate));
const severalPatches = () => state.patch === "" && patches().length > 1;
const called = (row) => (severalPatches() ? `${row.name} p${row.patch}` : row.name);
function ladderOf(row, what, many) {
  return row.ladders.find((ladder) => ladder.chip === state.chip && ladder.what === what && ladder.many === many);
}
function timingOf(row, what, many) {
  const ladder = ladderOf(row, what, many);
  return (ladder && ladder.points.find(({ size }) => size === state.size)) || null;
}
// A value of a timing that has a time; null where it could not be taken.
const over = (timing, value) => (timing && known(timing.median) ? value(timing) : null);

// Candidates compare by what was timed side by side with softmax; what was timed alone is told as such.
const isSoftmax = (row) => row.candidate === "softmax";
function tellRatio(row, t) {
  const pairs = known(t.ratio) && !isSoftmax(row) ? [["side by side", `${three(t.ratio)}× softmax's speed`]] : [];
  const spread = known(t.low) && known(t.high) ? ` ${range([t.low / t.batch, t.high / t.batch], three)}` : "";
  if (known(t.median)) pairs.push(["timed alone", `${three(t.median / t.batch)} ms an image${spread}`]);
  return pairs;
}
function scaleSentence(timed) {
  const others = timed.filter(([row, t]) => !isSoftmax(row) && known(t.median));
  const rated = others.filter(([, t]) => known(t.ratio)).length;
  if (!rated) return others.length ? "No ratio to softmax was taken here: each time was taken alone." : "";
  const rest = rated < others.length ? " Where softmax has no time, times are as each was taken alone." : "";
  return `A time is softmax's divided by the ratio taken side by side with it.${rest}`;
}

function choice(label, options, value, choose, id) {
  const entries = options.map(([key, text]) => {
    return el("option", { value: key, selected: String(key) === String(value) ? "" : null }, text);
  });
  const select = el("select", { id, onchange: () => choose(select.value) }, entries);
  return el("label", {}, label, select);
}
