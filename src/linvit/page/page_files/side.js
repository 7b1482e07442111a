// One of the two sides: its model and plan, what it says, and its map, which follows the pointer.
import { aborted, el, getBytes, percent, Refusal, work } from "/js/base.js";
import { draw, heat } from "/js/canvas.js";

const KEPT = 600; // rows that are not asked for again
const PATIENCE = 250; // milliseconds before one is told that there is work

export class Side {
  constructor(state, wish, on) {
    Object.assign(this, { state, wish, on, found: null, picture: null, row: null, rows: new Map(), asking: null, next: null });
    const field = (name, list) => {
      const change = () => {
        this.wish[name] = input.value.trim();
        this.on.wish(this);
      };
      const input = el("input", { list, value: wish[name], spellcheck: "false", autocomplete: "off", onchange: change });
      return [input, el("label", {}, name[0].toUpperCase() + name.slice(1), input)];
    };
    const [[model, modelLabel], [plan, planLabel]] = [field("model", "models"), field("plan", "plans")];
    Object.assign(this, { model, plan });
    for (const input of [model, plan]) input.addEventListener("focus", () => input.select());
    this.canvas = el("canvas", { width: 560, height: 560, tabindex: "0", role: "img", "aria-label": "Map over the picture" });
    this.stageText = el("span");
    this.busy = el("div", { class: "busy", role: "status", hidden: "" }, this.stageText,
      el("button", { type: "button", onclick: () => this.cancel() }, "Cancel"));
    this.about = el("p", { class: "about-map" });
    this.wrong = el("p", { class: "wrong", role: "alert", hidden: "" });
    this.answer = el("div");
    this.stage = el("div", { class: "stage" }, this.canvas, this.busy);
    this.node = el("div", { class: "side" }, el("div", { class: "wish" }, modelLabel, planLabel), this.wrong, this.stage, this.about, this.answer);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    if (x >= 0 && x < 1 && y >= 0 && y < 1) this.on.point(x, y);
  }

  step(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move || !this.found) return;
    event.preventDefault();
    const [height, width] = this.layer.grid;
    const inside = (value) => Math.min(0.9999, Math.max(0, value));
    this.on.point(inside(this.state.x + move[0] / width), inside(this.state.y + move[1] / height));
  }

  // The layer at the slider; where the sides have other numbers of layers, the one at the same depth.
  get index() {
    const last = this.found.layers.length - 1;
    return this.state.depth > 0 ? Math.round((this.state.layer / this.state.depth) * last) : 0;
  }
  get layer() {
    return this.found.layers[this.index];
  }

  refuse(error) {
    this.wrong.textContent = error ? error.message : "";
    this.wrong.hidden = !error;
  }

  cancel() {
    if (this.working) this.working.abort();
  }

  // Look at the picture; of what was asked before and has not come, nothing will.
  async look() {
    this.cancel();
    const working = (this.working = new AbortController());
    const patience = setTimeout(() => (this.busy.hidden = false), PATIENCE);
    this.stageText.textContent = "waiting";
    this.refuse(null);
    const asked = { ...this.wish, picture: this.state.picture, size: this.state.size };
    try {
      const found = await work("/api/look", asked, (event) => (this.stageText.textContent = event.stage), working.signal);
      const picture = new Image();
      picture.src = found.view;
      await picture.decode();
      if (this.working !== working) return;
      Object.assign(this, { found, picture });
      this.rows.clear();
      this.stage.style.aspectRatio = `${found.width} / ${found.height}`;
      [this.canvas.width, this.canvas.height] = [560, Math.round((560 * found.height) / found.width)];
      this.say(found);
      this.on.found(this);
    } catch (error) {
      if (this.working === working) this.refuse(aborted(error) ? new Refusal("cancelled: change something to look again", 0) : error);
    } finally {
      clearTimeout(patience);
      if (this.working === working) {
        this.busy.hidden = true;
        this.working = null;
      }
    }
  }

  say({ answer }) {
    const line = (name, share, value) =>
      el("li", {}, el("span", { class: "name", title: name }, name), el("meter", { value: share, min: 0, max: 1, "aria-label": name }), el("span", { class: "value" }, value));
    const lines = (answer.classes || []).map((one) => line(one.class, one.probability, percent(one.probability)));
    const many = (answer.objects || []).slice(0, 8);
    lines.push(...many.map((one) => line(one.class, one.score, one.score.toFixed(2))));
    const shares = Object.entries(answer.shares || {}).slice(0, 8);
    lines.push(...shares.map(([name, share]) => line(name, share, percent(share))));
    const parts = [el("ul", { class: "scores" }, lines)];
    if (answer.drawn) parts.unshift(el("img", { class: "drawn", src: answer.drawn, alt: "What the model found" }));
    if (answer.objects && !many.length) parts.push(el("p", { class: "caption" }, "No object scores 0.5 or more."));
    if (answer.error) parts.push(el("p", { class: "caption" }, answer.error));
    this.answer.replaceChildren(...parts);
  }

  // Draw the row that is asked for now: kept, or fetched; while one is on its way, only the latest waits.
  async follow() {
    if (!this.found) return;
    const { state, layer, index } = this;
    const [height, width] = layer.grid;
    const [column, line] = [Math.floor(state.x * width), Math.floor(state.y * height)];
    const query = state.query === "pointer" ? `${(column + 0.5) / width},${(line + 0.5) / height}` : state.query;
    const head = state.head < 0 || state.head >= layer.heads ? "mean" : String(state.head);
    const key = new URLSearchParams({ look: this.found.look, layer: index, show: state.show, query, head }).toString();
    this.frame = state.query === "pointer" ? { x: column / width, y: line / height, width: 1 / width, height: 1 / height } : null;
    const kept = this.rows.get(key);
    if (kept) {
      this.next = null;
      return this.paint(kept);
    }
    this.paint(this.row);
    if (this.asking) {
      this.next = key;
      return;
    }
    this.asking = key;
    try {
      const row = read(await getBytes(`/api/row?${key}`));
      if (this.rows.size > KEPT) this.rows.clear();
      this.rows.set(key, row);
      if (!this.next) this.paint(row);
      this.refuse(null);
    } catch (error) {
      if (error.status === 404) this.look(); // the server had to make room
      else {
        this.refuse(error);
        this.paint(null);
      }
    } finally {
      this.asking = null;
      if (this.next) {
        this.next = null;
        this.follow();
      }
    }
  }

  paint(row) {
    this.row = row;
    draw(this.canvas, this.picture, row && row.picture, this.frame);
    this.tell(row);
    this.on.painted();
  }

  tell(row) {
    const { layer, found } = this;
    const parts = [el("b", {}, layer.mechanism), ` in ${layer.name}, ${layer.grid[0]}×${layer.grid[1]} patches`];
    if (layer.windows > 1) parts.push(`, ${layer.windows} windows`);
    if (row && this.state.show !== "similarity") {
      parts.push(`. Spread over ${row.spread.toFixed(1)} keys`);
      if (row.prefix) parts.push(`; ${percent(row.rest)} to ${row.prefix === 1 ? "the class token" : `${row.prefix} prefix tokens`}`);
    }
    const notes = [this.state.show === "attention" ? layer.note : "", ...found.notes].filter(Boolean);
    if (notes.length) parts.push(`. ${notes.map((note) => note[0].toUpperCase() + note.slice(1)).join(". ")}`);
    this.about.replaceChildren(...parts, ".");
  }
}

// Three numbers (prefix tokens, rows, columns), then a value for each key.
function read(buffer) {
  const [prefix, height, width] = new Int32Array(buffer, 0, 3);
  const all = new Float32Array(buffer, 12);
  const values = all.subarray(prefix);
  const sum = (numbers) => numbers.reduce((total, x) => total + Math.abs(x), 0);
  const total = sum(all) || 1;
  const entropy = all.reduce((h, x) => (x ? h - (Math.abs(x) / total) * Math.log(Math.abs(x) / total) : h), 0);
  const shares = Array.from(values, (x) => Math.abs(x) / (sum(values) || 1));
  return { prefix, height, width, values, shares, spread: Math.exp(entropy), rest: sum(all.subarray(0, prefix)) / total, picture: heat(values, height, width) };
}
