// Time and memory over tokens, both axes logarithmic, with the fitted exponent at the end of each line.
const growth = { way: "inference many" };
const WAYS = {
  "inference many": "Inference, a batch",
  "inference one": "Inference, one image",
  "training many": "A training step, a batch",
  "training one": "A training step, one image",
};
const QUANTITIES = {
  time: {
    title: "milliseconds an image",
    of: (t) => (known(t.median) ? t.time : null), // on softmax's scale
    none: "No time was measured for this choice.",
  },
  memory: {
    title: "MiB an image",
    of: (t) => (known(t.peak_bytes) ? t.peak_bytes / t.batch / 2 ** 20 : null),
    none: "Memory was not measured on this device.",
  },
};
function ladderAlong(row, way = growth.way) {
  const [what, many] = way.split(" ");
  return ladderOf(row, what, many === "many");
}
function growthChoices() {
  const several = (row, way) => ladderAlong(row, way)?.points.length > 1;
  const there = Object.keys(WAYS).filter((way) => rowsNow().some((row) => several(row, way)));
  if (!there.includes(growth.way)) growth.way = there[0] || growth.way;
  const choose = (way) => {
    growth.way = way;
    drawGrowth();
  };
  const options = there.map((way) => [way, WAYS[way]]);
  byId("growth-choices").replaceChildren(choice("Pass", options, growth.way, choose, "growth-way"));
}
function drawGrowth() {
  for (const quantity of Object.keys(QUANTITIES)) drawQuantity(byId(quantity), quantity);
}
// Lines of one patch size, the finest that is shown, and what could not be measured.
function growthLines(name) {
  const timed = rowsNow().filter((row) => row.ladders.length);
  const patch = Math.min(...timed.map((row) => row.patch)), lines = [], lost = {};
  for (const row of rowsShown().filter((row) => row.patch === patch && !row.teacher)) {
    const ladder = ladderAlong(row), timings = ladder ? ladder.points : [];
    const points = timings.map((t) => ({ x: t.tokens, y: QUANTITIES[name].of(t), t })).filter(({ y }) => y > 0);
    for (const t of timings.filter(({ note }) => note)) {
      (lost[`${reason(t.note)} at ${whole(t.tokens)} tokens`] ||= []).push(row.name);
    }
    if (points.length) lines.push({ row, points, fit: ladder[name] });
  }
  return { patch, lines, lost };
}
// Lines that nobody could tell apart are said, not drawn: two or more, over the same tokens, within two percent.
function coincide(lines) {
  const [first, ...rest] = lines.map(({ points }) => points);
  const same = (points) => points.length === first.length && points.every((p, i) => closeTo(p, first[i]));
  return rest.length > 0 && rest.every(same);
}
const closeTo = (a, b) => a.x === b.x && Math.max(a.y, b.y) <= 1.02 * Math.min(a.y, b.y);
function sameSentence(lines, kind) {
  const [low, high] = [lines[0].points[0], lines[0].points.at(-1)];
  const to = low === high ? "" : ` to ${three(high.y)} at ${whole(high.x)}`;
  return `All ${lines.length} candidates lie within two percent of each other: ${kind.title} ${three(low.y)} at ${whole(low.x)} tokens${to}.`;
}
const reason = (note) => (note.startsWith("left out") ? "too slow to be timed" : note);
function drawQuantity(holder, name) {
  const kind = QUANTITIES[name], { patch, lines, lost } = growthLines(name);
  byId(`${name}-caption`).textContent = "";
  if (!lines.length) return nothing(holder, kind.none);
  if (coincide(lines)) return nothing(holder, sameSentence(lines, kind));
  const all = lines.flatMap((line) => line.points), tokens = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b);
  const write = ({ name, fit }) => `${name}${fit ? `  ${minus(fit.exponent.toFixed(2))}` : ""}`;
  const names = lines.map(({ row, fit }) => wrapped(write({ name: row.name, fit }), holder));
  const room = 20 + Math.max(...names.flat().map(widthOf));
  const height = Math.max(heightFor(holder, 0.72, 340, 460), 80 + 13 * names.flat().length);
  const x = { values: tokens, log: true, title: "tokens", write: whole, ticks: tokens };
  const y = { values: all.map((p) => p.y), log: true, title: kind.title, write: three };
  const at = frame(holder, height, x, y, room), items = [], ends = [];
  for (const { row, points, fit } of lines) {
    const group = itemGroup(row.candidate), places = points.map((p) => [at.X(p.x), at.Y(p.y)]);
    const line = { class: "line", points: places.join(" "), style: { stroke: hueOf(row.candidate) } };
    const nodes = places.map(([px, py]) => point(row.candidate, px, py, 4));
    group.append(svg("polyline", line), ...nodes);
    at.root.append(group);
    const tell = (p) => () => tellTiming(row, p, kind, fit);
    nodes.forEach((node, i) => items.push({ node, candidate: row.candidate, tell: tell(points[i]) }));
    const [px, py] = places.at(-1);
    ends.push({ x: px, y: py, group, candidate: row.candidate, name: row.name, fit });
  }
  endLabels(at, ends, (end) => wrapped(write(end), holder));
  interactive(at, items);
  const sentence = ([why, names]) => `${why[0].toUpperCase()}${why.slice(1)}: ${names.join(", ")}.`;
  byId(`${name}-caption`).textContent = [
    `${WAYS[growth.way]} on ${D.chips[state.chip]}${patch ? `, patches of ${patch} pixels` : ""}.`,
    "Beside each name the exponent fitted to the upper half of the ladder: 1 is linear in the tokens, 2 quadratic.",
    ...(name === "time" ? [scaleSentence(lines.flatMap(({ row, points }) => points.map(({ t }) => [row, t])))] : []),
    ...Object.entries(lost).map(sentence),
  ].join(" ");
}
function tellTiming(row, { x, y, t }, kind, fit) {
  const lines = [row.name, ["tokens", `${whole(x)} (${t.size} px, batch ${t.batch})`]];
  lines.push([kind.title, three(y)], ...tellRatio(row, t));
  if (fit) lines.push(["exponent", `${exponent(fit)}, ${fit.points} points`]);
  return [...lines, ["precision", t.how]];
}
const exponent = (fit) => `${minus(fit.exponent.toFixed(2))} ${range(fit.interval, (end) => minus(end.toFixed(2)))}`;
listeners.push(growthChoices, drawGrowth);
