// Time and memory over tokens, both axes logarithmic, with the fitted exponent at the end of each line.
const growth = { way: "inference many" };
const WAYS = { "inference many": "Inference, a batch", "inference one": "Inference, one image", "training many": "A training step, a batch", "training one": "A training step, one image" };
const QUANTITIES = {
  time: { title: "milliseconds an image", write: three, of: (t) => known(t[3]) ? t[3] / t[2] : null, fit: (s) => s.time, ends: (t) => known(t[4]) && known(t[5]) ? [t[4] / t[2], t[5] / t[2]] : null },
  memory: { title: "MiB an image", write: three, of: (t) => known(t[7]) ? t[7] / t[2] / 2 ** 20 : null, fit: (s) => s.memory, ends: () => null },
};
function growthPatch() {
  const all = patches().filter((p) => rowsNow().some((row) => row.patch === p && row.speeds.length));
  return all[0];
}
function growthChoices() {
  const there = Object.keys(WAYS).filter((way) => rowsNow().some((row) => (speedOf(row, way.split(" ")[0], way.endsWith("many")) || { ladder: [] }).ladder.length > 1));
  if (!there.includes(growth.way)) growth.way = there[0] || growth.way;
  byId("growth-choices").replaceChildren(choice("Pass", there.map((way) => [way, WAYS[way]]), growth.way, (v) => { growth.way = v; drawGrowth(); }, "growth-way"));
}
function drawGrowth() {
  for (const quantity of ["time", "memory"]) drawQuantity(byId(quantity), quantity);
}
function drawQuantity(holder, name) {
  const kind = QUANTITIES[name], [what, many] = growth.way.split(" "), patch = growthPatch(), note = byId(`${name}-caption`);
  note.textContent = "";
  const lines = [], missing = {};
  for (const row of rowsShown().filter((row) => row.patch === patch && !row.teacher)) {
    const speed = speedOf(row, what, many === "many");
    if (!speed) continue;
    const points = speed.ladder.map((t) => ({ x: t[1], y: kind.of(t), t })).filter((p) => known(p.y) && p.y > 0);
    const lost = speed.ladder.filter((t) => t[9]);
    for (const t of lost) (missing[`${t[9]} at ${whole(t[1])} tokens`] ||= []).push(row.name);
    if (points.length) lines.push({ row, points, fit: kind.fit(speed) });
  }
  if (!lines.length) return nothing(holder, name === "memory" ? "Memory was not measured on this device." : "No time was measured for this choice.");
  const all = lines.flatMap((line) => line.points), write = (end) => `${end.name}${end.fit ? "  " + end.fit.exponent.toFixed(2) : ""}`;
  const room = 20 + Math.max(...lines.map(({ row, fit }) => widthOf(write({ name: shortName(row), fit }))));
  const tokens = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b);
  const at = frame(holder, Math.max(heightFor(holder, 0.72, 340, 460), 80 + 13 * lines.length),
    { values: all.map((p) => p.x), log: true, title: "tokens", write: whole, ticks: tokens }, { values: all.map((p) => p.y), log: true, title: kind.title, write: kind.write }, room);
  const items = [], ends = [];
  for (const { row, points, fit } of lines) {
    const group = svg("g", { class: "item", "data-candidate": row.candidate }), colour = hueOf(row.candidate);
    group.append(svg("polyline", { class: "line", points: points.map((p) => `${at.X(p.x)},${at.Y(p.y)}`).join(" "), style: { stroke: colour } }));
    for (const p of points) {
      const node = point(row.candidate, at.X(p.x), at.Y(p.y), 4);
      group.append(node);
      items.push({ node, candidate: row.candidate, tell: () => tellTiming(row, p, kind, fit) });
    }
    at.root.append(group);
    const last = points[points.length - 1];
    ends.push({ x: at.X(last.x), y: at.Y(last.y), group, candidate: row.candidate, name: shortName(row), fit });
  }
  endLabels(at, ends, write);
  interactive(at, items);
  note.textContent = `${WAYS[growth.way]} on ${D.chips[state.chip]}, patches of ${patch} pixels. Beside each name the exponent fitted to the upper half of the ladder: 1 is linear in the tokens, 2 quadratic.` + Object.entries(missing).map(([why, names]) => ` ${why[0].toUpperCase()}${why.slice(1)}: ${names.join(", ")}.`).join("");
}
function shortName(row) {
  const most = spaceOf(byId("time")) < 460 ? 15 : 24;
  return row.name.length > most ? row.name.slice(0, most - 1) + "…" : row.name;
}
function tellTiming(row, p, kind, fit) {
  const lines = [row.name, ["tokens", `${whole(p.x)} (${p.t[0]} px, batch ${p.t[2]})`], [kind.title, kind.write(p.y) + (kind.ends(p.t) ? ` [${kind.ends(p.t).map(kind.write).join(", ")}]` : "")]];
  if (known(p.t[8])) lines.push(["softmax's speed", `${three(p.t[8])}×`]);
  if (fit) lines.push(["exponent", `${fit.exponent.toFixed(2)} ${fit.ends ? `[${fit.ends.map((e) => minus(e.toFixed(2))).join(", ")}]` : ""}, ${fit.points} points`]);
  lines.push(["precision", p.t[10]]);
  return lines;
}
listeners.push(() => { growthChoices(); drawGrowth(); });

// Accuracy over epochs: the mean over seeds, and a band from the worst to the best of them.
const learning = { from: "late" };
function drawCurves() {
  const holder = byId("curves"), patch = patches().includes(+state.patch) ? +state.patch : patches()[0];
  byId("learning-choices").replaceChildren(choice("Epochs", [["late", "the last half"], ["all", "all"]], learning.from, (v) => { learning.from = v; drawCurves(); }, "learning-from"));
  byId("curves-caption").textContent = "";
  let lines = rowsShown().filter((row) => row.patch === patch && !row.teacher && row.curve.length > 1).map((row) => ({ row, points: row.curve }));
  if (!lines.length) return nothing(holder, "No accuracy was kept epoch by epoch.");
  const longest = Math.max(...lines.map(({ points }) => points[points.length - 1][0]));
  if (learning.from === "late") lines = lines.map(({ row, points }) => ({ row, points: points.filter((p) => p[0] >= longest / 2) })).filter(({ points }) => points.length);
  const all = lines.flatMap(({ points }) => points), room = 20 + Math.max(...lines.map(({ row }) => widthOf(shortName(row) + "  88.8")));
  const at = frame(holder, Math.max(heightFor(holder, 0.42, 340, 500), 80 + 13 * lines.length), { range: [Math.min(...all.map((p) => p[0])), longest], title: "epochs", write: three }, { values: all.flatMap((p) => [p[2], p[3]]), title: "top-1, %", write: three }, room);
  const items = [], ends = [];
  for (const { row, points } of lines) {
    const group = svg("g", { class: "item", "data-candidate": row.candidate }), colour = hueOf(row.candidate);
    const up = points.map((p) => `${at.X(p[0])},${at.Y(p[3])}`), down = points.map((p) => `${at.X(p[0])},${at.Y(p[2])}`).reverse();
    if (row.seeds.length > 1) group.append(svg("polygon", { class: "band", points: [...up, ...down].join(" "), style: { fill: colour } }));
    group.append(svg("polyline", { class: "line", points: points.map((p) => `${at.X(p[0])},${at.Y(p[1])}`).join(" "), style: { stroke: colour } }));
    const last = points[points.length - 1];
    const node = point(row.candidate, at.X(last[0]), at.Y(last[1]), 4);
    group.append(node);
    at.root.append(group);
    items.push({ node, candidate: row.candidate, tell: () => [row.name, ["last epoch", `${percent(last[1], 2)} %`], ["seeds from … to", `${percent(last[2], 2)} … ${percent(last[3], 2)} %`], ["best epoch, mean", `${percent(row.best, 2)} %`], ["seeds", row.seeds.join(", ")]] });
    ends.push({ x: at.X(last[0]), y: at.Y(last[1]), group, candidate: row.candidate, name: shortName(row), value: last[1] });
  }
  endLabels(at, ends, (end) => `${end.name}  ${percent(end.value)}`);
  interactive(at, items);
  const single = lines.filter(({ row }) => row.seeds.length < 2).length;
  byId("curves-caption").textContent = `Patches of ${patch} pixels. Lines are means over seeds, bands reach from the worst seed to the best${single ? `; ${plural(single, "line")} of a single seed ${single === 1 ? "has" : "have"} none` : ""}.`;
}
listeners.push(drawCurves);
