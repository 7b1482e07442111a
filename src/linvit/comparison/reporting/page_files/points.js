// Points one can hover, tap and reach by keyboard, and the box in which they tell about themselves.
function point(candidate, x, y, r, hollow) {
  const ring = svg("circle", { class: "ring", r: r + 4 });
  const node = svg("g", { class: "point", transform: `translate(${x},${y})` }, ring, marker(candidate, r, hollow));
  node.place = [x, y];
  return node;
}
const itemGroup = (candidate) => svg("g", { class: "item", "data-candidate": candidate });

// `items` are {node, candidate, tell}. The nearest to the pointer tells; by keyboard a chart is one tab stop, and arrow
// keys go from point to point.
function interactive(at, items) {
  let shown = null;
  const show = (item) => {
    if (item === shown) return;
    if (shown) shown.node.classList.remove("on");
    if (item) item.node.classList.add("on");
    shown = item;
    light(at.root, item ? item.candidate : "");
    tip(item && item.node, item && item.tell());
  };
  const nearest = (event) => {
    const box = at.root.getBoundingClientRect(), zoom = at.width / box.width;
    const x = (event.clientX - box.left) * zoom, y = (event.clientY - box.top) * zoom;
    const away = ({ node: { place } }) => Math.hypot(place[0] - x, place[1] - y);
    const found = items.reduce((best, item) => (away(item) < away(best) ? item : best));
    return away(found) < 26 ? found : null;
  };
  for (const kind of ["pointermove", "pointerdown"]) at.root.addEventListener(kind, (event) => show(nearest(event)));
  at.root.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(null));
  items.forEach((item, index) => {
    const said = item.tell().map((part) => (Array.isArray(part) ? part.join(" ") : part));
    fill(item.node, {
      tabindex: index ? -1 : 0,
      role: "img",
      "aria-label": said.join(", "),
      onfocus: () => show(item),
      onblur: () => show(null),
      onkeydown: (event) => (event.key === "Escape" ? show(null) : walk(items, index, event)),
    }, []);
  });
}
function walk(items, index, event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = items[(index + step + items.length) % items.length].node;
  items.forEach(({ node }) => node.setAttribute("tabindex", node === next ? 0 : -1));
  next.focus();
}
// Dim what is not this candidate's; no candidate: nothing is dimmed.
function light(root, candidate) {
  root.classList.toggle("some", candidate !== "");
  root.querySelectorAll(".item").forEach((item) => item.classList.toggle("on", item.dataset.candidate === candidate));
}
function tip(node, lines) {
  const box = byId("tip");
  box.hidden = !node;
  if (!node) return;
  const [title, ...pairs] = lines;
  const list = pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  box.replaceChildren(el("b", {}, title), el("dl", {}, list));
  const at = node.getBoundingClientRect(), size = box.getBoundingClientRect();
  const middle = at.left + at.width / 2 - size.width / 2, above = at.top - size.height - 10;
  const left = Math.max(8, Math.min(document.documentElement.clientWidth - size.width - 8, middle));
  box.style.left = `${left + scrollX}px`;
  box.style.top = `${(above > 8 ? above : at.bottom + 10) + scrollY}px`;
}
