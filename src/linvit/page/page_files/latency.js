// Milliseconds of both sides by resolution: numbers for the one that is chosen, a curve for those that were measured.
import { aborted, byId, el, svg, three, work } from "/js/base.js";

export class Latency {
  constructor(state, sides) {
    Object.assign(this, { state, sides, times: new Map(), queue: [], working: null, failed: "" });
    byId("measure").addEventListener("click", () => this.ask(state.sizes));
    byId("cancel").addEventListener("click", () => this.cancel());
    this.draw();
  }

  forget() {
    this.cancel();
    this.times.clear();
    this.draw();
  }

  cancel() {
    this.queue = [];
    if (this.working) this.working.abort();
  }

  ask(sizes) {
    const wanted = sizes.filter((size) => !this.times.has(size) && !this.queue.includes(size) && size !== this.now);
    this.queue.push(...wanted);
    this.total = this.queue.length + (this.working ? 1 : 0);
    if (!this.working) this.run();
    this.draw();
  }

  async run() {
    const [cancel, progress, doing] = ["cancel", "progress", "doing"].map(byId);
    this.failed = "";
    while (this.queue.length) {
      const size = (this.now = this.queue.shift());
      const working = (this.working = new AbortController());
      cancel.hidden = progress.hidden = false;
      const before = Math.max(0, this.total - this.queue.length - 1);
      const tell = ({ stage, part = 0 }) => {
        progress.value = (before + part) / Math.max(1, this.total);
        doing.textContent = `${stage}, ${size} px`;
      };
      tell({ stage: "waiting" });
      try {
        const found = await work("/api/latency", { size, sides: this.sides.map((side) => side.wish) }, tell, working.signal);
        if (!working.signal.aborted) this.times.set(size, found.sides);
      } catch (error) {
        this.failed = aborted(error) ? "" : error.message;
        if (!aborted(error)) this.queue = [];
      }
      this.draw();
    }
    this.working = this.now = null;
    cancel.hidden = progress.hidden = true;
    doing.textContent = this.failed;
    doing.className = this.failed ? "wrong" : "";
    this.draw();
  }

  draw() {
    const times = this.times.get(this.state.size);
    byId("times").replaceChildren(...this.sides.map((side, i) => {
      const time = times && times[i];
      const ratio = times && i === 1 ? times[0].median / times[1].median : 0;
      const than = ratio ? (ratio >= 1 ? `${three(ratio)}× faster` : `${three(1 / ratio)}× slower`) : "";
      const name = side.wish.plan || "as it is";
      const about = time ? `${three(time.low)} to ${three(time.high)} ms over ${time.repeats} passes` : "not measured at this resolution";
      return el("div", { class: "side" }, el("p", { class: "caption" }, `${name}, ${this.state.size} px, one image`),
        el("p", { class: "big" }, time ? `${three(time.median)} ms` : "–", than ? el("small", {}, than) : ""), el("p", { class: "caption" }, about));
    }));
    byId("chart").replaceChildren(this.chart());
    byId("chart-note").textContent = this.times.size > 1
      ? "Medians of passes taken by turns on this machine, in eager PyTorch; whatever else it does meanwhile is in them."
      : "";
  }

  chart() {
    const sizes = [...this.times.keys()].sort((a, b) => a - b);
    if (sizes.length < 2) return el("span");
    const [width, height, left, bottom, top] = [640, 240, 48, 34, 12];
    const most = Math.max(...[...this.times.values()].flat().map((time) => time.median));
    const first = sizes[0];
    const last = sizes[sizes.length - 1];
    const x = (size) => left + ((size - first) / (last - first)) * (width - left - 20);
    const y = (ms) => height - bottom - (ms / most) * (height - bottom - top);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(svg("line", { class: "grid", x1: left, x2: width - 20, y1: y(share * most), y2: y(share * most) }));
      parts.push(svg("text", { x: left - 8, y: y(share * most) + 4, "text-anchor": "end" }, share ? three(share * most) : "0"));
    }
    let free = -Infinity; // where the next label may begin
    for (const size of sizes) {
      if (x(size) - 16 < free) continue;
      parts.push(svg("text", { x: x(size), y: height - 14, "text-anchor": "middle" }, String(size)));
      free = x(size) + 20;
    }
    parts.push(svg("text", { x: left, y: height }, "ms over pixels a side"));
    ["left", "right"].forEach((name, i) => {
      const points = sizes.map((size) => [x(size), y(this.times.get(size)[i].median)]);
      parts.push(svg("polyline", { class: `line ${name}`, points: points.map((point) => point.join(",")).join(" ") }));
      parts.push(...points.map(([cx, cy]) => svg("circle", { class: name, cx, cy, r: 3.5 })));
    });
    return svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Latency over resolution" }, parts);
  }
}
