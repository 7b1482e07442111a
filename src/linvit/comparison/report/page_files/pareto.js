// Accuracy over what it costs.
const COSTS = {
  throughput: { title: "time an image, ms", of: (row) => over(timingOf(row, "inference", true), (t) => t.median / t.batch), write: three, speed: true, how: "throughput batch" },
  latency: { title: "latency of one image, ms", of: (row) => over(timingOf(row, "inference", false), (t) => t.median), write: three, speed: true, how: "batch 1" },
  memory: { title: "inference memory, MiB", of: (row) => over(timingOf(row, "inference", true) || timingOf(row, "inference", false), (t) => t.peak && t.peak / 2 ** 20), write: three, speed: true, how: "throughput batch" },
  macs: { title: "MACs", of: (row) => row.macs, write: short },
  parameters: { title: "parameters", of: (row) => row.parameters, write: short },
  step: { title: "time of a training step an image, ms", of: (row) => over(timingOf(row, "training", true), (t) => t.median / t.batch), write: three, speed: true, how: "throughput batch" },
  training: { title: "training time, minutes", of: (row) => known(row.training.seconds) ? row.training.seconds / 60 : null, write: three, shared: true },
  training_memory: { title: "training memory, MiB", of: (row) => known(row.training.peak_bytes) ? row.training.peak_bytes / 2 ** 20 : null, write: three, shared: true },
  tokens: { title: "tokens", of: (row) => row.tokens, write: whole },
};
const COST_NAMES = { throughput: "Time an image (throughput)", latency: "Latency (one image)", memory: "Inference memory", macs: "MACs", parameters: "Parameters", step: "Training step, timed alone", training: "Training time", training_memory: "Training memory", tokens: "Tokens" };
const GAINS = {
  top1: { title: "top-1, %", of: (row) => row.top1, ends: (row) => row.ends, name: "Top-1 accuracy" },
  delta: { title: "top-1 against softmax, points", of: (row) => (row.delta ? row.delta.mean : row.candidate === "softmax" ? 0 : null), ends: (row) => row.delta && row.delta.ends, name: "Difference to softmax" },
  agreement: { title: "agreement with the teacher, %", of: (row) => row.conversion.agreement, ends: () => null, name: "Agreement with the teacher" },
  zero_shot: { title: "zero-shot top-1, %", of: (row) => row.conversion.zero_shot, ends: () => null, name: "Zero-shot top-1" },
};
const pareto = { x: "throughput", y: "top1", log: "" };
function over(timing, value) { return timing && known(timing.median) ? value(timing) : null; }

function front(points) {
  const sorted = [...points].sort((a, b) => a.x - b.x || b.y - a.y);
  let best = -Infinity;
  return sorted.filter((p) => p.y > best && ((best = p.y), true));
}
function paretoChoices() {
  const rows = rowsNow();
  const costs = Object.keys(COSTS).filter((key) => rows.some((row) => known(COSTS[key].of(row)) && COSTS[key].of(row) > 0));
  const gains = Object.keys(GAINS).filter((key) => rows.some((row) => known(GAINS[key].of(row))));
  if (!costs.includes(pareto.x)) pareto.x = costs.find((key) => key === "latency") || costs[0];
  if (!gains.includes(pareto.y)) pareto.y = gains[0];
  byId("pareto-choices").replaceChildren(
    choice("Vertical", gains.map((key) => [key, GAINS[key].name]), pareto.y, (v) => { pareto.y = v; drawPareto(); }, "pareto-y"),
    choice("Horizontal", costs.map((key) => [key, COST_NAMES[key]]), pareto.x, (v) => { pareto.x = v; pareto.log = ""; paretoChoices(); drawPareto(); }, "pareto-x"),
    choice("Scale", [["", "automatic"], ["log", "logarithmic"], ["linear", "linear"]], pareto.log, (v) => { pareto.log = v; drawPareto(); }, "pareto-log"),
  );
}
function drawPareto() {
  const holder = byId("pareto"), cost = COSTS[pareto.x], gain = GAINS[pareto.y];
  if (!cost || !gain) return nothing(holder, "No run has both an accuracy and a cost here.");
  const points = rowsShown().map((row) => ({ row, x: cost.of(row), y: gain.of(row) })).filter((p) => known(p.x) && p.x > 0 && known(p.y));
  if (!points.length) return nothing(holder, "Nothing was measured for this choice of device, resolution and patch.");
  const xs = points.map((p) => p.x), ends = points.flatMap((p) => gain.ends(p.row) || [p.y]);
  const log = pareto.log ? pareto.log === "log" : Math.max(...xs) / Math.min(...xs) > 8;
  const at = frame(holder, heightFor(holder, 0.5, 340, 580), { values: xs, log, title: cost.title, write: cost.write }, { values: near(points.map((p) => p.y), ends), title: gain.title, write: (t) => three(t) }, 24);
  const best = front(points);
  const steps = best.map((p, i) => (i ? `H${at.X(p.x)}V${at.Y(p.y)}` : `M${at.X(p.x)},${at.Y(p.y)}`)).join("");
  at.root.append(svg("path", { class: "front", d: steps + `H${at.right}` }));
  const items = [], labels = [];
  for (const p of [...points].sort((a, b) => b.y - a.y)) {
    const x = at.X(p.x), y = at.Y(p.y), range = gain.ends(p.row), candidate = p.row.candidate;
    const group = svg("g", { class: "item", "data-candidate": candidate });
    if (range) group.append(svg("line", { class: "bar", x1: x, x2: x, y1: Math.min(at.Y(range[0]), at.bottom), y2: Math.max(at.Y(range[1]), at.top), style: { stroke: hueOf(candidate) } }));
    const node = point(candidate, x, y, 5.6, hollowAt(p.row));
    group.append(node);
    at.root.append(group);
    items.push({ node, candidate, tell: () => tellRow(p.row, [cost.title, cost.write(p.x)], gain.title, p.y, range) });
    const first = candidate === "softmax" || best.includes(p);
    if (!at.narrow || first) labels.push({ x, y, text: at.narrow ? p.row.name : called(p.row), group, first });
  }
  labels.sort((a, b) => b.first - a.first);
  placeLabels(at, labels, items.map(({ node: { place: [x, y] } }) => [x - 6, y - 6, x + 6, y + 6]));
  interactive(at, items);
  caption(points, best, cost);
}
// Wide intervals must not press the points together: a bar may leave the chart.
function near(values, ends) {
  const low = Math.min(...values), high = Math.max(...values), room = Math.max(0.6 * (high - low), 1);
  return [...values, Math.max(Math.min(...ends), low - room), Math.min(Math.max(...ends), high + room)];
}
function tellRow(row, cost, title, value, range) {
  const lines = [called(row), [title.replace(/,.*/, ""), `${title.startsWith("top-1 against") ? signed(value, 2) : percent(value, 2)} ${range ? bounds(range, 2, percent) : ""}`], cost];
  if (row.delta) lines.push([`Δ ${row.delta.against}`, `${signed(row.delta.mean, 2)} ${bounds(row.delta.ends)}`]);
  lines.push(["seeds", row.seeds.join(", ")], ["trained at", `${row.size} px, ${whole(row.tokens)} tokens`]);
  return lines;
}
function caption(points, best, cost) {
  const names = best.map((p) => called(p.row));
  const text = [`Dotted: the Pareto front (${names.join(", ")}); nothing shown is both cheaper and more accurate.`, "Bars are 95 % intervals."];
  if (cost.speed) text.push(`Timed on ${D.chips[state.chip]} at ${state.size} px (${cost.how}); accuracy is at the resolution each was trained at.`);
  if (cost.shared && points.some((p) => p.row.training.shared > 1)) text.push("Trainings shared their device, so this axis says little.");
  if (state.patch === "" && patches().length > 1) text.push(`Filled: patches of ${patches()[0]} pixels; hollow: larger ones.`);
  if (rowsNow().some((row) => row.teacher)) text.push("The teacher is hollow.");
  byId("pareto-caption").textContent = text.join(" ");
}
listeners.push(() => { paretoChoices(); drawPareto(); });
