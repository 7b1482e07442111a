// Accuracy over epochs: the mean over seeds, and a band from the worst to the best of them.
const learning = { from: "late" };
function learningChoices() {
  const choose = (from) => {
    learning.from = from;
    drawCurves();
  };
  const options = [["late", "the last half"], ["all", "all"]];
  byId("learning-choices").replaceChildren(choice("Epochs", options, learning.from, choose, "learning-from"));
}
function drawCurves() {
  const holder = byId("curves"), patch = state.patch === "" ? patches()[0] : Number(state.patch);
  byId("curves-caption").textContent = "";
  const rows = rowsShown().filter((row) => row.patch === patch && !row.teacher && row.curve.length > 1);
  if (!rows.length) return nothing(holder, "No accuracy was kept epoch by epoch.");
  const longest = Math.max(...rows.map((row) => row.curve.at(-1).epoch));
  const from = learning.from === "late" ? longest / 2 : 0;
  const lines = rows.map((row) => ({ row, points: row.curve.filter(({ epoch }) => epoch >= from) }));
  const drawn = lines.filter(({ points }) => points.length), all = drawn.flatMap(({ points }) => points);
  const names = drawn.map(({ row }) => wrapped(`${row.name}  88.8`, holder));
  const room = 20 + Math.max(...names.flat().map(widthOf));
  const height = Math.max(heightFor(holder, 0.42, 340, 500), 80 + 13 * names.flat().length);
  const x = { range: [Math.min(...all.map(({ epoch }) => epoch)), longest], title: "epochs", write: three };
  const y = { values: all.flatMap(({ low, high }) => [low, high]), title: `${metric()}, %`, write: three };
  const at = frame(holder, height, x, y, room), items = [], ends = [];
  for (const { row, points } of drawn) {
    const group = itemGroup(row.candidate), colour = hueOf(row.candidate), last = points.at(-1);
    const along = (name) => points.map((p) => [at.X(p.epoch), at.Y(p[name])]);
    const band = [...along("high"), ...along("low").reverse()].join(" ");
    if (row.seeds.length > 1) group.append(svg("polygon", { class: "band", points: band, style: { fill: colour } }));
    group.append(svg("polyline", { class: "line", points: along("mean").join(" "), style: { stroke: colour } }));
    const node = point(row.candidate, ...along("mean").at(-1), 4), [px, py] = node.place;
    group.append(node);
    at.root.append(group);
    items.push({ node, candidate: row.candidate, tell: () => tellCurve(row, last) });
    ends.push({ x: px, y: py, group, candidate: row.candidate, name: row.name, value: last.mean });
  }
  endLabels(at, ends, ({ name, value }) => wrapped(`${name}  ${percent(value)}`, holder));
  interactive(at, items);
  const single = drawn.filter(({ row }) => row.seeds.length < 2).length;
  const bare = single ? `; ${plural(single, "line")} of a single seed ${single === 1 ? "has" : "have"} none` : "";
  byId("curves-caption").textContent =
    `${patch ? `Patches of ${patch} pixels. ` : ""}Lines are means over seeds, bands reach from the worst seed to the best${bare}.`;
}
function tellCurve(row, { mean, low, high }) {
  return [
    row.name,
    ["last epoch", `${percent(mean, 2)} %`],
    ["seeds from … to", `${percent(low, 2)} … ${percent(high, 2)} %`],
    ["best epoch, mean", `${percent(row.best, 2)} %`],
    ["seeds", row.seeds.join(", ")],
  ];
}
listeners.push(learningChoices, drawCurves);
