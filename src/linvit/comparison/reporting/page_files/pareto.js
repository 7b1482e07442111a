// Accuracy over what it costs.
const timeOf = (row, what, many) => over(timingOf(row, what, many), (t) => t.time); // on softmax's scale
const mebibytes = (x) => (known(x) ? x / 2 ** 20 : null);
const COSTS = {
  throughput: {
    name: "Time an image (throughput)",
    title: "time an image, ms",
    of: (row) => timeOf(row, "inference", true),
    timing: (row) => timingOf(row, "inference", true),
    timed: "throughput batch",
  },
  latency: {
    name: "Latency (one image)",
    title: "latency of one image, ms",
    of: (row) => timeOf(row, "inference", false),
    timing: (row) => timingOf(row, "inference", false),
    timed: "batch 1",
  },
  memory: {
    name: "Inference memory",
    title: "inference memory, MiB",
    of: (row) => over(timingOf(row, "inference", true) || timingOf(row, "inference", false), (t) => mebibytes(t.peak_bytes)),
    timed: "throughput batch",
  },
  macs: { name: "MACs", title: "MACs", of: (row) => row.macs, write: short },
  parameters: { name: "Parameters", title: "parameters", of: (row) => row.parameters, write: short },
  step: {
    name: "Training step, timed alone",
    title: "training step an image, ms",
    of: (row) => timeOf(row, "training", true),
    timing: (row) => timingOf(row, "training", true),
    timed: "throughput batch",
  },
  training: {
    name: "Training time",
    title: "training time, minutes",
    of: (row) => (known(row.training.seconds) ? row.training.seconds / 60 : null),
    shared: true,
  },
  training_memory: {
    name: "Training memory",
    title: "training memory, MiB",
    of: (row) => mebibytes(row.training.peak_bytes),
    shared: true,
  },
  tokens: { name: "Tokens", title: "tokens", of: (row) => row.tokens, write: whole },
};
const GAINS = {
  score: {
    name: () => (byImage() ? `${capital(metric())} accuracy` : metric()),
    title: () => `${metric()}, %`,
    of: (row) => row.score,
    ends: (row) => row.interval,
    write: percent,
  },
  delta: {
    name: () => "Difference to the baseline",
    title: () => `${metric()} against the baseline, points`,
    of: (row) => (row.delta ? row.delta.mean : row.candidate === "softmax" ? 0 : null),
    ends: (row) => row.delta && row.delta.interval,
    write: signed,
  },
  agreement: {
    name: () => "Agreement with the teacher",
    title: () => "agreement with the teacher, %",
    of: (row) => row.conversion.agreement,
    ends: () => null,
    write: percent,
  },
  zero_shot: {
    name: () => `Zero-shot ${metric()}`,
    title: () => `zero-shot ${metric()}, %`,
    of: (row) => row.conversion.zero_shot,
    ends: () => null,
    write: percent,
  },
};
const SCALES = [["", "automatic"], ["log", "logarithmic"], ["linear", "linear"]];
const pareto = { x: "throughput", y: "score", log: "" };

function paretoChoices() {
  const rows = rowsNow();
  const costs = Object.keys(COSTS).filter((key) => rows.some((row) => COSTS[key].of(row) > 0));
  const gains = Object.keys(GAINS).filter((key) => rows.some((row) => known(GAINS[key].of(row))));
  if (!costs.includes(pareto.x)) pareto.x = costs.includes("latency") ? "latency" : costs[0];
  if (!gains.includes(pareto.y)) pareto.y = gains[0];
  const set = (name) => (value) => {
    pareto[name] = value;
    drawPareto();
  };
  byId("pareto-choices").replaceChildren(
    choice("Vertical", gains.map((key) => [key, GAINS[key].name()]), pareto.y, set("y"), "pareto-y"),
    choice("Horizontal", costs.map((key) => [key, COSTS[key].name]), pareto.x, set("x"), "pareto-x"),
    choice("Scale", SCALES, pareto.log, set("log"), "pareto-log"),
  );
}
function drawPareto() {
  const holder = byId("pareto"), cost = COSTS[pareto.x], gain = GAINS[pareto.y];
  byId("pareto-caption").textContent = "";
  if (!cost || !gain) return nothing(holder, "No run has both an accuracy and a cost here.");
  const points = rowsShown()
    .map((row) => ({ row, x: cost.of(row), y: gain.of(row) }))
    .filter(({ x, y }) => x > 0 && known(y))
    .sort((a, b) => b.y - a.y);
  if (!points.length) return nothing(holder, "Nothing was measured for this choice of device, resolution and patch.");
  const xs = points.map((p) => p.x), ys = points.map((p) => p.y), best = front(points), write = cost.write || three;
  const log = pareto.log ? pareto.log === "log" : Math.max(...xs) / Math.min(...xs) > 8;
  const levels = near(ys, points.flatMap((p) => gain.ends(p.row) || []));
  const x = { values: xs, log, title: cost.title, write }, y = { values: levels, title: gain.title(), write: three };
  const at = frame(holder, heightFor(holder, 0.5, spaceOf(holder) < 560 ? 520 : 340, 580), x, y, 24);
  const steps = best.map((p, i) => (i ? `H${at.X(p.x)}V${at.Y(p.y)}` : `M${at.X(p.x)},${at.Y(p.y)}`));
  at.root.append(svg("path", { class: "front", d: `${steps.join("")}H${at.right}` }));
  const items = points.map((p) => paretoItem(at, p, cost, gain));
  const boxes = items.map(({ node: { place: [px, py] } }) => [px - 6, py - 6, px + 6, py + 6]);
  const first = (p) => best.includes(p) || p.row.candidate === "softmax";
  const labels = points.map((p, i) => {
    const [px, py] = items[i].node.place;
    return { x: px, y: py, text: called(p.row), group: items[i].group, first: first(p) };
  });
  placeLabels(at, labels.sort((a, b) => b.first - a.first), boxes);
  interactive(at, items);
  byId("pareto-caption").textContent = paretoCaption(points, best, cost);
}
function paretoItem(at, { row, x, y }, cost, gain) {
  const group = itemGroup(row.candidate), ends = gain.ends(row), px = at.X(x);
  if (ends) {
    const y1 = Math.min(at.Y(ends[0]), at.bottom), y2 = Math.max(at.Y(ends[1]), at.top);
    group.append(svg("line", { class: "bar", x1: px, x2: px, y1, y2, style: { stroke: hueOf(row.candidate) } }));
  }
  const node = point(row.candidate, px, at.Y(y), 5.6, hollowAt(row));
  group.append(node);
  at.root.append(group);
  const value = `${gain.write(y, 2)} ${range(ends, (end) => gain.write(end, 2))}`;
  const lines = [called(row), [gain.title().replace(/,.*/, ""), value], [cost.title, (cost.write || three)(x)]];
  if (cost.timing) lines.push(...tellRatio(row, cost.timing(row)));
  if (row.delta) lines.push([`Δ ${row.delta.against}`, `${signed(row.delta.mean, 2)} ${bounds(row.delta.interval)}`]);
  lines.push(["seeds", row.seeds.join(", ")], ["trained at", `${row.size} px, ${whole(row.tokens)} tokens`]);
  return { node, group, candidate: row.candidate, tell: () => lines };
}
// The points that nobody beats, by rising cost.
function front(points) {
  let best = -Infinity;
  const sorted = [...points].sort((a, b) => a.x - b.x || b.y - a.y);
  return sorted.filter(({ y }) => {
    const better = y > best;
    best = Math.max(best, y);
    return better;
  });
}
// Wide intervals must not press the points together: a bar may leave the chart.
function near(values, ends) {
  const low = Math.min(...values), high = Math.max(...values), room = Math.max(0.6 * (high - low), 1);
  return [...values, Math.max(Math.min(low, ...ends), low - room), Math.min(Math.max(high, ...ends), high + room)];
}
function paretoCaption(points, best, cost) {
  const names = best.map((p) => called(p.row)).join(", ");
  const text = [`Dotted: the Pareto front (${names}); nothing shown is both cheaper and more accurate.`];
  text.push("Bars are 95 % intervals.");
  if (cost.timed) {
    text.push(`Timed on ${D.chips[state.chip]} at ${state.size} px (${cost.timed});`);
    text.push("accuracy is at the resolution each was trained at.");
  }
  if (cost.timing) text.push(scaleSentence(points.map(({ row }) => [row, cost.timing(row)])));
  if (cost.shared && points.some((p) => p.row.training.shared > 1))
    text.push("Trainings shared their device, so this axis says little.");
  if (severalPatches()) text.push(`Filled: patches of ${patches()[0]} pixels; hollow: larger ones.`);
  if (rowsNow().some((row) => row.teacher)) text.push("The teacher is hollow.");
  return text.join(" ");
}
listeners.push(paretoChoices, drawPareto);
