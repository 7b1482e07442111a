// Axes, labels that keep out of each other's way, and points one can hover, tap and reach by keyboard.
function scale(low, high, from, to, log) {
  const f = log ? Math.log : (x) => x;
  const span = f(high) - f(low) || 1;
  return (x) => from + ((f(x) - f(low)) / span) * (to - from);
}
function padded(values, log, share = 0.07) {
  const low = Math.min(...values), high = Math.max(...values);
  if (log) { const grow = Math.max((high / low) ** share, 1.06); return [low / grow, high * grow]; }
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}
function ticks(low, high, log, most) {
  if (log) {
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const step of steps) if (step * 10 ** power >= low && step * 10 ** power <= high) found.push(step * 10 ** power);
      if (found.length <= most && found.length > 1) return found;
    }
  }
  const rough = (high - low) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * unit).find((x) => x >= rough);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return log ? found.filter((x) => x > 0) : found;
}
const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, font = 12) {
  pen.font = `${font}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// A frame with axes: {x: {values, log, title, write, ticks}, y: {…}}. Gives scales and the group to draw into.
function frame(holder, height, x, y, right = 16) {
  const width = spaceOf(holder), narrow = width < 560;
  const [x0, x1] = x.range || padded(x.values, x.log), [y0, y1] = y.range || padded(y.values, y.log);
  const yTicks = ticks(y0, y1, y.log, 6), left = 10 + Math.max(...yTicks.map((t) => widthOf(y.write(t))));
  const top = 26, bottom = height - 44;
  const X = scale(x0, x1, left, width - right, x.log), Y = scale(y0, y1, bottom, top, y.log);
  const root = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `${y.title} over ${x.title}` });
  for (const t of yTicks) root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(t), y2: Y(t) }), svg("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, y.write(t)));
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

// Names beside points: each takes the first free place around its point, or one further off with a leader, or none.
function placeLabels(at, wanted, taken) {
  const boxes = [...taken];
  const free = (box) => box[0] >= at.left - 4 && box[2] <= at.width && box[1] >= at.top - 14 && box[3] <= at.bottom + 2 && !boxes.some((b) => box[0] < b[2] && box[2] > b[0] && box[1] < b[3] && box[3] > b[1]);
  for (const { x, y, text, group } of wanted) {
    const w = widthOf(text), h = 13;
    let done = false;
    for (const d of [9, 16, 26, 38]) {
      for (const [dx, dy] of [[1, 0], [0, -1], [-1, 0], [0, 1], [0.8, -0.8], [0.8, 0.8], [-0.8, -0.8], [-0.8, 0.8]]) {
        const cx = x + dx * (d + (dx ? w / 2 : 0) * Math.abs(dx)), cy = y + dy * (d + 2);
        const box = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2];
        if (!free(box)) continue;
        boxes.push(box);
        if (d > 16) group.append(svg("line", { class: "leader", x1: x, y1: y, x2: Math.min(Math.max(x, box[0]), box[2]), y2: Math.min(Math.max(y, box[1]), box[3]) }));
        group.append(svg("text", { class: "name", x: cx, y: cy + 4, "text-anchor": "middle" }, text));
        done = true;
        break;
      }
      if (done) break;
    }
  }
}
// Names at the ends of lines, pushed apart downwards and upwards until none overlaps.
function endLabels(at, ends, write) {
  const sorted = [...ends].sort((a, b) => a.y - b.y), gap = 13;
  let last = -Infinity;
  for (const end of sorted) last = end.place = Math.max(end.y, last + gap);
  let limit = at.bottom + 4;
  for (const end of [...sorted].reverse()) limit = (end.place = Math.min(end.place, limit)) - gap;
  for (const end of sorted) {
    const x = at.right + 12;
    end.group.append(svg("polyline", { class: "leader", points: `${end.x + 6},${end.y} ${at.right + 2},${end.y} ${x - 2},${end.place}`, fill: "none" }));
    end.group.append(svg("text", { class: "name", x, y: end.place + 4, style: { fill: hueOf(end.candidate) } }, write(end)));
  }
}

// A point of a chart; `place` is where it stands.
function point(candidate, x, y, r, hollow) {
  const node = svg("g", { class: "point", transform: `translate(${x},${y})` }, svg("circle", { class: "ring", r: r + 4 }), marker(candidate, r, hollow));
  node.place = [x, y];
  return node;
}
// Points that tell about themselves: the nearest one to the pointer, or by keyboard, where a chart is one tab stop and
// arrow keys go from point to point.
function interactive(at, items) {
  let shown = null;
  const show = (item) => {
    if (item === shown) return;
    if (shown) shown.node.classList.remove("on");
    shown = item;
    light(at.root, item ? item.candidate : "");
    if (item) item.node.classList.add("on");
    tip(item && item.node, item && item.tell());
  };
  const nearest = (event) => {
    const box = at.root.getBoundingClientRect(), zoom = at.width / box.width;
    const x = (event.clientX - box.left) * zoom, y = (event.clientY - box.top) * zoom;
    const away = (item) => Math.hypot(item.node.place[0] - x, item.node.place[1] - y);
    const found = items.reduce((best, item) => (away(item) < away(best) ? item : best));
    return away(found) < 26 ? found : null;
  };
  for (const kind of ["pointermove", "pointerdown"]) at.root.addEventListener(kind, (event) => show(nearest(event)));
  at.root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
  items.forEach((item, index) => {
    const { node } = item;
    node.setAttribute("tabindex", index ? -1 : 0);
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", item.tell().map((part) => (Array.isArray(part) ? part.join(" ") : part)).join(", "));
    node.addEventListener("focus", () => show(item));
    node.addEventListener("blur", () => show(null));
    node.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return show(null);
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = items[(index + step + items.length) % items.length].node;
      items.forEach((other) => other.node.setAttribute("tabindex", other.node === next ? 0 : -1));
      next.focus();
    });
  });
}
function light(root, candidate) {
  root.classList.toggle("some", candidate !== "");
  root.querySelectorAll(".item").forEach((item) => item.classList.toggle("on", item.dataset.candidate === candidate));
}
function tip(node, lines) {
  const box = byId("tip");
  box.hidden = !node;
  if (!node) return;
  const [title, ...pairs] = lines;
  box.replaceChildren(el("b", {}, title), el("dl", {}, pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  const at = node.getBoundingClientRect(), size = box.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(wide - size.width - 8, at.left + at.width / 2 - size.width / 2));
  const above = at.top - size.height - 10;
  box.style.left = `${left + scrollX}px`;
  box.style.top = `${(above > 8 ? above : at.bottom + 10) + scrollY}px`;
}
function nothing(holder, why) {
  holder.replaceChildren(el("p", { class: "empty" }, why));
}
const heightFor = (holder, share, low, high) => Math.round(Math.min(high, Math.max(low, spaceOf(holder) * share)));
