// One colour and one marker for a candidate, everywhere.
const SQUARE = [[-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]];
const UP = [[0, -1.15], [1.08, 0.8], [-1.08, 0.8]];
const DOWN = [[0, 1.15], [1.08, -0.8], [-1.08, -0.8]];
const DIAMOND = [[0, -1.25], [1.1, 0], [0, 1.25], [-1.1, 0]];
const CROSS = turned([[-0.38, -1.1], [0.38, -1.1], [0.38, -0.38]]);
const SALTIRE = turned([[-0.5, -1.05], [0, -0.5], [0.5, -1.05], [1.05, -1.05]]);
const SHAPES = [circle, SQUARE, UP, DIAMOND, DOWN, CROSS, star(5, 1.35, 0.58), star(3, 1.1, 0.95), SALTIRE];

function circle(r) {
  return `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`;
}
function polygon(corners, r) {
  return `M${corners.map(([x, y]) => `${(x * r).toFixed(2)},${(y * r).toFixed(2)}`).join("L")}Z`;
}
// A quarter of a shape, turned three times.
function turned(quarter) {
  const turn = (corners) => corners.map(([x, y]) => [-y, x]);
  const second = turn(quarter), third = turn(second);
  return [...quarter, ...second, ...third, ...turn(third)];
}
function star(tips, outer, inner) {
  return [...Array(2 * tips).keys()].map((i) => {
    const angle = (Math.PI * i) / tips - Math.PI / 2, far = i % 2 ? inner : outer;
    return [Math.cos(angle) * far, Math.sin(angle) * far];
  });
}
const styleOf = (candidate) => D.styles[candidate] || { hue: -1, shade: 0, marker: 0 };
function hueOf(candidate) {
  const { hue, shade } = styleOf(candidate), full = `var(--h${hue})`;
  if (hue < 0) return "var(--ink)";
  return shade ? `color-mix(in oklab, ${full} ${Math.round(100 * 0.6 ** shade)}%, var(--soft))` : full;
}
function marker(candidate, r = 5, hollow = false) {
  const shape = SHAPES[styleOf(candidate).marker % SHAPES.length], colour = hueOf(candidate);
  const style = hollow
    ? { fill: "var(--paper)", stroke: colour, "stroke-width": 1.75 }
    : { fill: colour, stroke: "var(--paper)", "stroke-width": 0.75 };
  return svg("path", { d: shape === circle ? circle(r) : polygon(shape, r), style });
}
function badge(candidate) {
  return svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" }, marker(candidate, 4.6));
}
// Larger patches are hollow beside smaller ones, and so is the teacher.
const hollowAt = (row) => row.teacher || (severalPatches() && row.patch !== patches()[0]);
