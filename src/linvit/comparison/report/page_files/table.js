// The picks below the answer, and the table of everything, sorted, filtered and opened.
const picking = { tolerance: 1, ladder: "" };
function drawPicks() {
  const holder = byId("picks");
  const kinds = [...new Map(D.ladders.filter((l) => l.picks.length).map((l) => [`${l.chip} ${l.many}`, l])).entries()];
  if (!kinds.length) return holder.replaceChildren();
  if (!kinds.some(([key]) => key === picking.ladder)) picking.ladder = kinds[0][0];
  const ladder = D.ladders.find((l) => `${l.chip} ${l.many}` === picking.ladder && l.tolerance === picking.tolerance);
  const press = (value, text, current, choose) => el("button", { type: "button", "aria-pressed": String(value === current), onclick: () => { choose(value); drawPicks(); } }, text);
  holder.replaceChildren(
    el("div", { class: "chips", role: "group", "aria-label": "Points of accuracy to give up" }, "Fastest, giving up at most",
      [...new Set(D.ladders.map((l) => l.tolerance))].map((t) => press(t, `${t} ${t === 1 ? "point" : "points"}`, picking.tolerance, (v) => { picking.tolerance = v; }))),
    el("div", { class: "chips", role: "group", "aria-label": "Device and batch", style: { "margin-top": "8px" } }, "on",
      kinds.map(([key, l]) => press(key, `${D.chips[l.chip]}, ${l.many ? `batches of ${l.batch}` : "one image"}`, picking.ladder, (v) => { picking.ladder = v; }))),
    el("ol", { class: "picks" }, ladder.picks.map(([tokens, size, place, ratio, rivals]) => {
      const row = D.rows[place] || { candidate: "softmax", name: "softmax" }, delta = row.delta;
      return el("li", {}, el("span", { class: "n" }, `${whole(tokens)} tokens · ${size} px`), el("span", { class: "who" }, badge(row.candidate), row.name),
        row.candidate === "softmax" ? "nothing is clearly faster" : [known(ratio) ? `${three(ratio)}× softmax's speed` : "softmax does not run", delta ? el("br") : null, delta ? `${signed(delta.mean)} points ${bounds(delta.ends)}` : null],
        rivals.length && row.candidate !== "softmax" ? [el("br"), `as fast: ${rivals.slice(0, 3).join(", ")}${rivals.length > 3 ? ` and ${rivals.length - 3} more` : ""}`] : null);
    })),
  );
}

const many = (row, what) => timingOf(row, what, true);
const COLUMNS = [
  { id: "name", head: "Candidate", of: (row) => row.name, left: true },
  { id: "patch", head: "Patch", of: (row) => row.patch || null, cell: (row) => row.patch || "own" },
  { id: "size", head: "Size\npx", of: (row) => row.size },
  { id: "tokens", head: "Tokens", of: (row) => row.tokens, cell: (row) => whole(row.tokens) },
  { id: "top1", head: "Top-1\n% ±", of: (row) => row.top1, cell: (row) => [percent(row.top1, 2), el("span", { class: "pm" }, row.ends ? ` ±${percent((row.ends[1] - row.ends[0]) / 2, 2)}` : "")], hint: "Mean over seeds and its 95 % interval" },
  { id: "delta", head: "Δ softmax\npoints, 95 %", of: (row) => (row.delta ? row.delta.mean : row.candidate === "softmax" ? 0 : null), cell: deltaCell, hint: "Paired with softmax seed by seed and image by image" },
  { id: "zero_shot", head: "Zero-shot\n%", of: (row) => row.conversion.zero_shot, cell: (row) => percent(row.conversion.zero_shot), mode: "distil" },
  { id: "agreement", head: "Agrees\n%", of: (row) => row.conversion.agreement, cell: (row) => percent(row.conversion.agreement), mode: "distil", hint: "How often it chooses the teacher's class" },
  { id: "kl", head: "KL\nnats", of: (row) => row.conversion.kl, cell: (row) => three(row.conversion.kl), mode: "distil" },
  { id: "seeds", head: "Seeds", of: (row) => row.seeds.length },
  { id: "parameters", head: "Params", of: (row) => row.parameters, cell: (row) => short(row.parameters) },
  { id: "macs", head: "MACs", of: (row) => row.macs, cell: (row) => short(row.macs) },
  { id: "latency", head: "Latency\nms", of: (row) => over(timingOf(row, "inference", false), (t) => t.median), cell: (row) => timed(timingOf(row, "inference", false), (t) => three(t.median)), speed: true, hint: "One image, median" },
  { id: "ips", head: "Images/s", of: (row) => over(many(row, "inference"), (t) => t.ips), cell: (row) => timed(many(row, "inference"), (t) => whole(t.ips)), speed: true, hint: "Throughput of a batch" },
  { id: "ratio", head: "× softmax", of: (row) => over(many(row, "inference"), (t) => t.ratio), cell: (row) => timed(many(row, "inference"), (t) => (known(t.ratio) ? three(t.ratio) : "–")), speed: true, hint: "Throughput against softmax, side by side" },
  { id: "memory", head: "Memory\nMiB", of: (row) => over(many(row, "inference"), (t) => t.peak), cell: (row) => timed(many(row, "inference"), (t) => (known(t.peak) ? three(t.peak / 2 ** 20) : "–")), speed: true, hint: "Peak of inference, a batch" },
  { id: "exponent", head: "Exponent", of: (row) => exponentOf(row)?.exponent ?? null, cell: (row) => exponentOf(row)?.exponent.toFixed(2) ?? "–", speed: true, hint: "Of time over tokens" },
  { id: "train", head: "Training\nimages/s", of: (row) => row.training.images_per_second, cell: (row) => [whole(row.training.images_per_second), row.training.shared > 1 ? el("span", { class: "pm", title: "the device was shared" }, " *") : ""] },
  { id: "drift", head: "fp16 drift\n% rms", of: (row) => (row.drift.float16 ? row.drift.float16[0] : null), cell: driftCell, hint: "Relative change of the logits in float16" },
];
const sorting = { id: "top1", up: false }, open = new Set();
let query = "";
const exponentOf = (row) => (speedOf(row, "inference", true) || speedOf(row, "inference", false) || {}).time;
const timed = (timing, write) => (!timing ? "–" : known(timing.median) ? write(timing) : el("span", { class: "pm", title: timing.note }, /memory/.test(timing.note) ? "OOM" : timing.note || "–"));
function driftCell(row) {
  const found = row.drift.float16;
  return !found ? "–" : found[2] ? three(100 * found[0]) : el("span", { class: "worse" }, "not finite");
}
function deltaCell(row) {
  if (!row.delta) return el("span", { class: "pm" }, row.teacher ? "teacher" : row.candidate === "softmax" ? "baseline" : "–");
  const { mean, ends } = row.delta, clear = ends && (ends[0] > 0 || ends[1] < 0);
  return [ends ? glyph(row) : null, el("span", { class: clear ? (mean > 0 ? "better" : "worse") : null }, signed(mean, 2)), el("span", { class: "pm" }, ends ? ` ${bounds(ends)}` : " one seed")];
}
// The interval as a little line around zero, on one scale for all rows.
function glyph(row) {
  const reach = Math.max(1, ...rowsNow().flatMap((r) => (r.delta && r.delta.ends ? r.delta.ends.map(Math.abs) : []))), { mean, ends } = row.delta;
  const X = (v) => 48 + (Math.max(-reach, Math.min(reach, v)) / reach) * 45, colour = hueOf(row.candidate);
  return svg("svg", { class: "glyph", width: 96, height: 12, viewBox: "0 0 96 12", "aria-hidden": "true" },
    svg("line", { x1: 48, x2: 48, y1: 0, y2: 12, style: { stroke: "var(--soft)", "stroke-width": 0.75 } }),
    svg("line", { x1: X(ends[0]), x2: X(ends[1]), y1: 6, y2: 6, style: { stroke: colour, "stroke-width": 1.5 } }),
    svg("circle", { cx: X(mean), cy: 6, r: 2.75, style: { fill: colour } }));
}
function columnsNow() {
  const rows = rowsNow(), mode = D.settings[state.setting].mode;
  const narrow = printing || document.documentElement.clientWidth < 700, place = ["patch", "size", "tokens"];
  const same = (column) => new Set(rows.map(column.of)).size < 2;
  const order = narrow ? [...COLUMNS].sort((a, b) => rank(a) - rank(b)) : COLUMNS;
  return order.filter((column) => !(narrow && place.includes(column.id) && same(column)) && (!column.mode || column.mode === mode) && (column.id === "name" || rows.some((row) => known(column.of(row)))));
}
// On a phone accuracy comes before the place it was measured at.
const rank = (column) => (column.id === "name" ? 0 : ["top1", "delta"].includes(column.id) ? 1 : 2);
function sortedRows() {
  const column = COLUMNS.find((c) => c.id === sorting.id) || COLUMNS[0];
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (row) => words.every((word) => [row.name, row.mechanism, row.paper, `patch ${row.patch}`, `${row.size}px`].join(" ").toLowerCase().includes(word));
  return rowsNow().filter(fits).sort((a, b) => {
    const x = column.of(a), y = column.of(b);
    if (!known(x) || !known(y)) return known(y) - known(x);
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (sorting.up ? order : -order) || a.name.localeCompare(b.name);
  });
}
function drawTable() {
  const columns = columnsNow(), rows = sortedRows();
  if (!columns.some((c) => c.id === sorting.id)) sorting.id = "name";
  const head = el("tr", {}, columns.map((column) => el("th", { scope: "col", class: column.left ? null : "r", "aria-sort": sorting.id === column.id ? (sorting.up ? "ascending" : "descending") : null },
    el("button", { type: "button", title: column.hint, "data-sort": column.id, onclick: () => sortBy(column) }, column.head))));
  const body = el("tbody", {}, rows.flatMap((row) => rowNodes(row, columns)));
  const table = el("table", { "aria-labelledby": "h-table" }, el("thead", {}, head), body);
  const box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of results, scrolls sideways" }, table);
  byId("rows").replaceChildren(el("p", { class: "about", role: "status" }, aboutTable(rows, columns)), box);
  box.style.setProperty("--seen", `${box.clientWidth}px`);
}
function aboutTable(rows, columns) {
  const speed = columns.some((c) => c.speed) ? ` Speeds: ${D.chips[state.chip]}, ${state.size} px.` : "";
  return `${plural(rows.length, "row")}.${speed}${rows.some((r) => r.training.shared > 1) ? " * the device was shared while training." : ""} Open a row for its runs.`;
}
function sortBy(column) {
  sorting.up = sorting.id === column.id ? !sorting.up : Boolean(column.left);
  sorting.id = column.id;
  drawTable();
  byId("rows").querySelector(`[data-sort="${column.id}"]`).focus();
}
function rowNodes(row, columns) {
  const id = D.rows.indexOf(row), shown = open.has(id);
  const opener = el("button", { type: "button", class: "opener", "aria-expanded": String(shown), "aria-controls": `more-${id}`, onclick: () => toggleRow(id) }, badge(row.candidate), row.name);
  const cells = columns.map((column) => (column.id === "name" ? el("td", {}, opener) : el("td", { class: "r" }, column.cell ? column.cell(row) : known(column.of(row)) ? String(column.of(row)) : "–")));
  const line = el("tr", { id: `row-${id}`, class: row.candidate === "softmax" ? "base" : null }, cells);
  return shown ? [line, el("tr", { class: "more", id: `more-${id}` }, el("td", { colspan: columns.length }, inside(row)))] : [line];
}
function toggleRow(id) {
  if (!open.delete(id)) open.add(id);
  drawTable();
  byId(`row-${id}`).querySelector(".opener").focus();
}
function inside(row) {
  const pairs = [["Paper", row.paper], ["Top-5", percent(row.top5, 2) + " %"], ["Best epoch, mean", percent(row.best, 2) + " %"], ["Standard error over seeds", known(row.error) ? three(row.error) : "one seed"]];
  if (row.delta) pairs.push([`Δ to ${row.delta.against}, these images`, `${signed(row.delta.mean, 2)} ${bounds(row.delta.seeds_ends)}`], ["paired over", `${plural(row.delta.seeds, "seed")}${row.delta.images ? `, ${whole(row.delta.images)} images` : ""}`]);
  for (const [dtype, found] of Object.entries(row.drift)) if (found) pairs.push([`Drift ${dtype}`, found[2] ? `${three(100 * found[0])} % rms, agrees ${percent(found[1])} %` : "not finite"]);
  pairs.push(["Training", `${seconds(row.training.seconds)}${row.training.shared > 1 ? ", device shared" : ""}`], ["Training memory", bytes(row.training.peak_bytes)]);
  for (const speed of row.speeds) if (speed.time) pairs.push([`Exponent, ${D.chips[speed.chip].slice(0, 16)}, ${speed.what}${speed.many ? "" : ", one image"}`, `${speed.time.exponent.toFixed(2)} ${speed.time.ends ? `[${speed.time.ends.map((e) => minus(e.toFixed(2))).join(", ")}]` : ""}`]);
  const timing = D.timed[row.key];
  return el("div", { class: "inside" }, el("dl", { class: "numbers" }, pairs.filter(([, v]) => v).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))),
    row.runs.map((run) => aRun(row, run)), timing ? el("div", { class: "run" }, el("h4", {}, "Speeds"), command(timing)) : null);
}
function aRun(row, run) {
  const environment = D.environments[run.environment], about = [`${percent(run.top1, 2)} %`, run.key, environment.hardware, run.when, seconds(run.seconds)].filter(Boolean).join(" · ");
  return el("div", { class: "run", id: `run-${run.key}` }, el("h4", {}, row.teacher ? "Teacher " : `Seed ${run.seed} `, el("span", {}, about)), command(run.command), run.conversion ? el("p", { class: "pm" }, run.conversion) : null,
    el("details", {}, el("summary", {}, "Config"), el("pre", {}, listed({ seed: run.seed, ...D.configs[run.config] }))),
    el("details", {}, el("summary", {}, "Environment"), el("pre", {}, listed(environment))));
}
function command(text) {
  if (!text) return null;
  const button = el("button", { type: "button", class: "copy", onclick: async () => { button.textContent = (await copied(text)) ? "Copied" : "Select and copy"; setTimeout(() => { button.textContent = "Copy"; }, 1600); } }, "Copy");
  return el("div", { class: "command" }, el("pre", {}, text), button);
}
async function copied(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch {
    const area = el("textarea", {}, text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
listeners.push(drawTable);
