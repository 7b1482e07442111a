// Axes, and labels that keep out of each other's way.
let printing = false; // on paper, charts are drawn for its width
function spaceOf(holder) {
  if (printing) return holder.closest(".pair") ? 345 : 700;
  return Math.max(280, holder.clientWidth);
}
function heightFor(holder, share, low, high) {
  return Math.round(Math.min(high, Math.max(low, spaceOf(holder) * share)));
}
function scale(low, high, from, to, log) {
  const f = log ? Math.log : (x) => x;
  const span = f(high) - f(low) || 1;
  return (x) => from + ((f(x) - f(low)) / span) * (to - from);
}
function padded(values, log, share = 0.07) {
  const low = Math.min(...values), high = Math.max(...values);
  if (log) {
    const grow = Math.max((high / low) ** share, 1.06);
    return [low / grow, high * grow];
  }
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}
function ticks(low, high, log, most) {
  for (const steps of log ? [[1, 2, 5], [1, 3], [1]] : []) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      found.push(...steps.map((step) => step * 10 ** power).filter((x) => x >= low && x <= high));
    if (found.length > 1 && found.length <= most) return found;
  }
  const rough = (high - low) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * unit).find((x) => x >= rough);
  const first = Math.ceil(low / step), count = Math.floor(high / step + 1e-9) - first + 1;
  return [...Array(count).keys()].map((i) => (first + i) * step).filter((x) => !log || x > 0);
}
const pen = document.createElement("canvas").getContext("2d");
function widthOf(text) {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// A frame with axes, {values or range, log, title, write, ticks} each, and the scales to draw into it by.
function frame(holder, height, x, y, right) {
  const width = spaceOf(holder), narrow = width < 560, top = 26, bottom = height - 44;
  const [x0, x1] = x.range || padded(x.values, x.log), [y0, y1] = padded(y.values, y.log);
  const levels = ticks(y0, y1, y.log, 6), left = 10 + Math.max(...levels.map((t) => widthOf(y.write(t))));
  const X = scale(x0, x1, left, width - right, x.log), Y = scale(y0, y1, bottom, top, y.log);
  const label = `${y.title} over ${x.title}`, viewBox = `0 0 ${width} ${height}`;
  const root = svg("svg", { class: "plot", viewBox, width, height, role: "group", "aria-label": label });
  for (const t of levels) {
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(t), y2: Y(t) }));
    root.append(svg("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, y.write(t)));
  }
  let end = -Infinity;
  for (const t of x.ticks || ticks(x0, x1, x.log, narrow ? 4 : 8)) {
    const text = x.write(t), half = widthOf(text) / 2;
    root.append(svg("line", { class: "axis", x1: X(t), x2: X(t), y1: bottom, y2: bottom + 4 }));
    if (X(t) - half < end + 8) continue;
    root.append(svg("text", { x: X(t), y: bottom + 18, "text-anchor": "middle" }, text));
    end = X(t) + half;
  }
  root.append(
    svg("line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom }),
    svg("text", { x: 0, y: 11 }, y.title + (y.log ? ", log" : "")),
    svg("text", { x: width - right, y: height - 6, "text-anchor": "end" }, x.title + (x.log ? ", log →" : " →")),
  );
  holder.replaceChildren(root);
  return { root, X, Y, left, right: width - right, top, bottom, width, narrow };
}
function nothing(holder, why) {
  holder.replaceChildren(el("p", { class: "empty" }, why));
}

// Names beside points: each takes the first free place around its point, or one further off with a leader, or none.
const AROUND = [[1, 0], [0, -1], [-1, 0], [0, 1], [0.8, -0.8], [0.8, 0.8], [-0.8, -0.8], [-0.8, 0.8]];
function placeLabels(at, wanted, taken) {
  const boxes = [...taken];
  const within = ([x0, y0, x1, y1]) => x0 >= at.left - 4 && x1 <= at.width && y0 >= at.top - 14 && y1 <= at.bottom + 2;
  const meet = (a, b) => a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1];
  for (const { x, y, text, group } of wanted) {
    const lines = wrap(text, at.narrow ? 18 : 44), size = [Math.max(...lines.map(widthOf)), 13 * lines.length];
    const place = freePlace(x, y, size, (box) => within(box) && !boxes.some((other) => meet(box, other)));
    if (!place) continue;
    const { box, far } = place;
    boxes.push(box);
    if (far) {
      const x2 = Math.min(Math.max(x, box[0]), box[2]), y2 = Math.min(Math.max(y, box[1]), box[3]);
      group.append(svg("line", { class: "leader", x1: x, y1: y, x2, y2 }));
    }
    group.append(named(lines, (box[0] + box[2]) / 2, box[1] + 10.5, { "text-anchor": "middle" }));
  }
}
// A name in one line or more.
function named(lines, x, y, attributes) {
  const parts = lines.map((line, i) => svg("tspan", { x, y: y + 13 * i }, line));
  return svg("text", { class: "name", ...attributes }, parts);
}
// Text in lines of at most so many letters: whole words where that is possible, and nothing cut off.
function wrap(text, most) {
  const lines = [""];
  for (const word of text.split(/(?<=\s)/).flatMap((word) => word.match(new RegExp(`.{1,${most}}`, "gsu")) || []))
    if ((lines.at(-1) + word).trimEnd().length > most) lines.push(word);
    else lines[lines.length - 1] += word;
  return lines.map((line) => line.trimEnd()).filter(Boolean);
}
const wrapped = (text, holder) => wrap(text, spaceOf(holder) < 460 ? 17 : 40);
function freePlace(x, y, [width, height], free) {
  for (const d of [9, 16, 26, 38, 54, 74, 98])
    for (const [dx, dy] of AROUND) {
      const cx = x + dx * d + (Math.sign(dx) * Math.abs(dx) * width) / 2;
      const cy = y + dy * (d + 2) + (Math.sign(dy) * (height - 13)) / 2;
      const box = [cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2];
      if (free(box)) return { box, far: d > 16 };
    }
  return null;
}

// Names at the ends of lines, pushed apart downwards and then upwards until none overlaps.
function endLabels(at, ends, write) {
  const sorted = ends.map((end) => ({ ...end, lines: write(end) })).sort((a, b) => a.y - b.y), x = at.right + 12;
  let free = -Infinity, limit = at.bottom + 17;
  for (const end of sorted) free = (end.place = Math.max(end.y, free)) + 13 * end.lines.length;
  for (const end of sorted.toReversed()) limit = end.place = Math.min(end.place, limit - 13 * end.lines.length);
  for (const { group, candidate, place, lines, ...end } of sorted) {
    const leader = `${end.x + 6},${end.y} ${at.right + 2},${end.y} ${x - 2},${place}`;
    const fill = `color-mix(in oklab, ${hueOf(candidate)} 82%, var(--ink))`;
    group.append(svg("polyline", { class: "leader", points: leader, fill: "none" }));
    group.append(named(lines, x, place + 4, { style: { fill } }));
  }
}
