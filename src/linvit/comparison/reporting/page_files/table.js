// The table of everything, sorted and filtered; rows open to their runs.
const one = (row) => timingOf(row, "inference", false), batch = (row) => timingOf(row, "inference", true);
const exponentOf = (row) => (ladderOf(row, "inference", true) || ladderOf(row, "inference", false) || {}).time;
const muted = (text, title) => el("span", { class: "pm", title }, text);
const COLUMNS = [
  { id: "name", head: "Candidate", of: (row) => row.name },
  { id: "patch", head: "Patch", of: (row) => row.patch || null, cell: (row) => row.patch || "own" },
  { id: "size", head: "Size\npx", of: (row) => row.size, write: whole },
  { id: "tokens", head: "Tokens", of: (row) => row.tokens, write: whole },
  { id: "score", head: scoreHead, of: (row) => row.score, cell: scoreCell, hint: "Mean over seeds, its 95 % interval" },
  { id: "delta", head: deltaHead, of: (row) => GAINS.delta.of(row), cell: deltaCell, hint: deltaHint },
  ...Object.entries(D.secondary).map(([id, name]) => {
    return { id, head: `${name}\n%`, of: (row) => row.metrics[id], write: (x) => percent(x, 2) };
  }),
  { id: "zero_shot", head: "Zero-shot\n%", of: (row) => row.conversion.zero_shot, write: percent, mode: "distil" },
  { id: "agreement", head: "Agrees\n%", of: (row) => row.conversion.agreement, write: percent, mode: "distil" },
  { id: "kl", head: "KL\nnats", of: (row) => row.conversion.kl, mode: "distil" },
  { id: "seeds", head: "Seeds", of: (row) => row.seeds.length, write: whole },
  { id: "parameters", head: "Params", of: (row) => row.parameters, write: (x) => short(x, true) },
  { id: "macs", head: macsHead, of: (row) => row.macs, write: (x) => short(x, true) },
  { id: "ratio", head: "× softmax\na batch", timing: batch, value: (t) => t.ratio, hint: "Throughput, timed side by side" },
  { id: "ratio_one", head: "× softmax\none image", timing: one, value: (t) => t.ratio, hint: "Speed of one image, timed side by side" },
  { id: "latency", head: "Latency, ms\nalone", timing: one, value: (t) => t.median, alone: true, hint: "One image, median, timed in its own job" },
  { id: "ips", head: "Images/s\nalone", timing: batch, value: (t) => t.images_per_second, write: whole, alone: true, hint: "A batch, timed in its own job" },
  { id: "memory", head: "Memory\nMiB", timing: batch, value: (t) => mebibytes(t.peak_bytes), hint: "Peak, a batch" },
  { id: "exponent", head: "Exponent", of: (row) => exponentOf(row)?.exponent, write: (x) => percent(x, 2) },
  { id: "train", head: "Training\nimages/s", of: (row) => row.training.images_per_second, cell: trainCell },
  { id: "drift", head: "fp16 drift\n% rms", of: (row) => row.drift.float16?.relative_rms, cell: driftCell, hint: "Of logits" },
];
for (const column of COLUMNS.filter(({ timing }) => timing)) {
  column.of = (row) => over(column.timing(row), column.value);
  column.cell = (row) => timedCell(column.timing(row), column);
}
const PLACE = ["patch", "size", "tokens"];
const sorting = { id: "score", up: false }, open = new Set();
let query = "";

function scoreHead() {
  return `${byImage() ? capital(metric()) : metric()}\n% ±`;
}
function scoreCell(row) {
  return [percent(row.score, 2), row.interval ? muted(` ±${percent((row.interval[1] - row.interval[0]) / 2, 2)}`, row.seeds.length === 2 ? TWO_SEEDS : null) : null];
}
function trainCell(row) {
  const shared = row.training.shared > 1 ? muted(" *", "the device was shared") : null;
  return [whole(row.training.images_per_second), shared];
}
function driftCell(row) {
  const found = row.drift.float16;
  if (!found) return "–";
  return found.finite ? even(100 * found.relative_rms) : el("span", { class: "worse" }, "not finite");
}
const TWO_SEEDS =
  "± of two seeds is 12.7 standard errors (Student's t with one degree of freedom), so it is wide even where they agree." +
  " Δ is paired seed by seed and, where that is known, image by image, so it can be clear where ± is not.";
const even = (x) => three(x, true);
const ASTRAY = "softmax took another time in its own job: the ratio counts";
function timedCell(timing, { value, write = even, alone }) {
  if (!timing) return "–";
  if (known(timing.median)) return [write(value(timing)), alone && timing.astray ? muted(" †", ASTRAY) : null];
  const { note } = timing;
  return muted(note.includes("memory") ? "OOM" : note.startsWith("left out") ? "too slow" : "–", note);
}
function deltaHead() {
  const teacher = rowsNow().some(({ delta }) => delta && delta.against !== "softmax");
  return `Δ ${teacher ? "teacher" : "softmax"}\npoints, 95 %`;
}
function deltaHint() {
  return byImage() ? "Paired by seed and image" : "Paired by seed";
}
function macsHead() {
  const part = rowsNow().find(({ counted }) => counted)?.counted;
  return part ? `MACs\n${part}` : "MACs";
}
function deltaCell(row) {
  if (!row.delta) return muted(row.teacher ? "teacher" : row.candidate === "softmax" ? "baseline" : "–");
  const { mean, interval: ends } = row.delta, clear = ends && (ends[0] > 0 || ends[1] < 0);
  const value = el("span", { class: clear ? (mean > 0 ? "better" : "worse") : null }, signed(mean, 2));
  return [value, muted(ends ? ` ${bounds(ends)}` : " one seed"), ends ? glyph(row) : null];
}
// The interval as a little line beside zero, on one scale for all rows.
function glyph(row) {
  const all = rowsNow().flatMap((r) => r.delta?.interval || []), low = Math.min(-1, ...all), high = Math.max(1, ...all);
  const X = (v) => 3 + ((v - low) / (high - low)) * 60, { mean, interval: ends } = row.delta, stroke = hueOf(row.candidate);
  return svg(
    "svg",
    { class: "glyph", width: 66, height: 12, viewBox: "0 0 66 12", "aria-hidden": "true" },
    svg("line", { x1: X(0), x2: X(0), y1: 0, y2: 12, style: { stroke: "var(--soft)", "stroke-width": 0.75 } }),
    svg("line", { x1: X(ends[0]), x2: X(ends[1]), y1: 6, y2: 6, style: { stroke, "stroke-width": 1.5 } }),
    svg("circle", { cx: X(mean), cy: 6, r: 2.75, style: { fill: stroke } }),
  );
}

function columnsNow() {
  const rows = rowsNow(), mode = D.settings[state.setting].mode;
  const wide = document.documentElement.clientWidth, narrow = printing || wide < 700;
  const spared = narrow || wide < 1400 ? PLACE : []; // if all rows share them: the menus and charts say them
  const same = (column) => new Set(rows.map(column.of)).size < 2;
  const told = (column) => column.id === "name" || rows.some((row) => known(column.of(row)));
  const wanted = (column) => (!column.mode || column.mode === mode) && told(column);
  const found = COLUMNS.filter((column) => wanted(column) && !(spared.includes(column.id) && same(column)));
  // Where there is little room, accuracy comes before the place it was measured at.
  const rank = ({ id }) => (id === "name" ? 0 : ["score", "delta"].includes(id) ? 1 : 2);
  return narrow ? found.sort((a, b) => rank(a) - rank(b)) : found;
}
function sortedRows() {
  const column = COLUMNS.find(({ id }) => id === sorting.id), words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (row) => `${row.name} ${row.candidate} ${row.mechanism} ${row.paper} patch ${row.patch} ${row.size}px`.toLowerCase();
  const order = (a, b) => {
    const x = column.of(a), y = column.of(b);
    if (!known(x) || !known(y)) return known(y) - known(x);
    const rising = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (sorting.up ? rising : -rising) || a.name.localeCompare(b.name);
  };
  return rowsNow().filter((row) => words.every((word) => text(row).includes(word))).sort(order);
}
function drawTable() {
  const columns = columnsNow();
  if (!columns.some(({ id }) => id === sorting.id)) sorting.id = "name";
  const rows = sortedRows(), head = el("tr", {}, columns.map(headCell));
  const body = el("tbody", {}, rows.map((row) => rowNodes(row, columns)));
  const table = el("table", { "aria-labelledby": "h-table" }, el("thead", {}, head), body);
  const label = "Table of results, scrolls sideways";
  const box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
  const hint = el("p", { class: "more-hint", "aria-hidden": "true" }, "more columns: scroll sideways →");
  byId("rows").replaceChildren(el("p", { class: "about", role: "status" }, aboutTable(rows, columns)), hint, box);
  box.style.setProperty("--seen", `${box.clientWidth}px`);
  const look = () => {
    const left = box.scrollWidth - box.clientWidth - box.scrollLeft;
    hint.hidden = box.scrollWidth <= box.clientWidth + 1;
    box.classList.toggle("goes-on", left > 1);
  };
  box.addEventListener("scroll", look, { passive: true });
  look();
}
function headCell(column) {
  const sorted = sorting.id === column.id ? (sorting.up ? "ascending" : "descending") : null;
  const said = (text) => (typeof text === "function" ? text() : text);
  const attributes = { type: "button", title: said(column.hint), "data-sort": column.id, onclick: () => sortBy(column) };
  return el(
    "th",
    { scope: "col", class: column.id === "name" ? null : "r", "aria-sort": sorted },
    el("button", attributes, said(column.head)),
  );
}
function aboutTable(rows, columns) {
  const text = [`${plural(rows.length, "row")}.`];
  if (columns.some(({ timing }) => timing)) {
    text.push(`Speeds: ${D.chips[state.chip]}, ${state.size} px. × softmax was timed side by side and ranks candidates;`);
    text.push("what is called alone was timed in each one's own job.");
  }
  const astray = rows.filter((row) => [one(row), batch(row)].some((timing) => timing?.astray)).map(({ name }) => name);
  if (astray.length)
    text.push(`† alone and side by side disagree by more than their spread (${few(astray)}): the ratio counts.`);
  if (rows.some((row) => row.training.shared > 1)) text.push("* the device was shared while training.");
  if (rows.some((row) => row.seeds.length === 2)) text.push(TWO_SEEDS);
  return [...text, "Open a row for its runs."].join(" ");
}
const few = (names) => (names.length > 5 ? `${names.length} rows` : names.join(", "));
function sortBy(column) {
  sorting.up = sorting.id === column.id ? !sorting.up : column.id === "name";
  sorting.id = column.id;
  drawTable();
  byId("rows").querySelector(`[data-sort="${column.id}"]`).focus();
}
function rowNodes(row, columns) {
  const id = D.rows.indexOf(row), shown = open.has(id);
  const state = { "aria-expanded": String(shown), "aria-controls": `more-${id}`, onclick: () => toggleRow(id) };
  const opener = el("button", { type: "button", class: "opener", ...state }, badge(row.candidate), row.name);
  const cells = columns.map((column) => {
    if (column.id === "name") return el("td", {}, opener);
    return el("td", { class: "r" }, column.cell ? column.cell(row) : (column.write || even)(column.of(row)));
  });
  const line = el("tr", { id: `row-${id}`, class: row.candidate === "softmax" ? "base" : null }, cells);
  if (!shown) return [line];
  return [line, el("tr", { class: "more", id: `more-${id}` }, el("td", { colspan: columns.length }, inside(row)))];
}
function toggleRow(id) {
  if (!open.delete(id)) open.add(id);
  drawTable();
  byId(`row-${id}`).querySelector(".opener").focus();
}
function drawFilter() {
  const look = () => {
    query = input.value;
    drawTable();
  };
  const input = el("input", { type: "search", id: "filter", placeholder: "name, paper, patch 4 …", oninput: look });
  byId("table-choices").append(el("label", {}, "Filter", input));
}
listeners.push(drawTable);
