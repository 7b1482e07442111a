// The page: one picture, two sides, and what is shown of them.
import { byId, chips, el, getJson, percent, sendFile, themes } from "/js/base.js";
import { draw, rgb } from "/js/canvas.js";
import { Latency } from "/js/latency.js";
import { Side } from "/js/side.js";

const SETTLED = 350; // milliseconds after which a slider is taken to stand still
const state = { picture: "", size: 0, sizes: [], layer: 0, depth: 0, head: -1, show: "attention", query: "pointer", x: 0.5, y: 0.5 };
let sides = [];
let latency;
const bothLooked = () => sides.every((side) => side.found);

function later(milliseconds, act) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, milliseconds);
  };
}

function refuse(error) {
  byId("refusal").textContent = error ? error.message : "";
  byId("refusal").hidden = !error;
}

// Pictures: a sample by name, a file by what the server calls it.
function choose(picture) {
  refuse(null);
  state.picture = picture;
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.name === picture));
  sides.forEach((side) => side.look());
}
async function send(file) {
  refuse(null);
  try {
    if (file.size > state.mostBytes) throw new Error(`the file is too large: at most ${state.mostBytes / 2 ** 20} MiB are taken, make it smaller`);
    choose((await sendFile("/api/pictures", file)).picture);
  } catch (error) {
    refuse(error);
  }
}
function takeFiles() {
  byId("file").addEventListener("change", (event) => {
    if (event.target.files[0]) send(event.target.files[0]);
    event.target.value = "";
  });
  let depth = 0;
  const over = (step) => (event) => {
    event.preventDefault();
    depth = Math.max(0, depth + step);
    document.body.classList.toggle("over", depth > 0);
  };
  addEventListener("dragenter", over(1));
  addEventListener("dragleave", over(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    document.body.classList.remove("over");
    const file = event.dataTransfer && event.dataTransfer.files[0];
    if (file) send(file);
    else refuse(new Error("that is no file: drop a picture"));
  });
}

// Sliders.
function settle() {
  const layers = sides.filter((side) => side.found).map((side) => side.found.layers.length);
  const depth = Math.max(1, ...layers) - 1;
  if (depth !== state.depth) {
    state.layer = state.depth ? Math.round((state.layer / state.depth) * depth) : depth;
    state.depth = depth;
  }
  const heads = Math.max(1, ...sides.filter((side) => side.found).map((side) => side.layer.heads));
  state.head = Math.min(state.head, heads - 1);
  Object.assign(byId("layer"), { max: depth, value: state.layer });
  Object.assign(byId("head"), { max: heads - 1, value: state.head, disabled: state.show !== "attention" });
  byId("layer-out").textContent = `${state.layer} of ${depth}`;
  byId("head-out").textContent = state.head < 0 || state.show !== "attention" ? "mean" : `${state.head} of ${heads - 1}`;
}
function follow() {
  settle();
  sides.forEach((side) => side.follow());
}
function controls() {
  chips(byId("show"), [
    ["attention", "Attention", "What a query takes from each patch"],
    ["rollout", "Rollout", "Attention through all layers up to this one"],
    ["similarity", "Similarity", "Cosine between the features of patches"],
  ], state.show, (show) => { state.show = show; follow(); });
  chips(byId("query"), [
    ["pointer", "Pointer", "The patch under the pointer; arrow keys move it"],
    ["class", "Class token", "What the class token takes"],
    ["all", "All", "The mean over all queries"],
  ], state.query, (query) => { state.query = query; follow(); });
  const colours = later(120, features);
  byId("layer").addEventListener("input", (event) => { state.layer = Number(event.target.value); follow(); colours(); });
  byId("head").addEventListener("input", (event) => { state.head = Number(event.target.value); follow(); });
  const resized = later(SETTLED, () => {
    sides.forEach((side) => side.look());
    latency.ask([state.size]);
  });
  byId("size").addEventListener("input", (event) => {
    state.size = state.sizes[Number(event.target.value)];
    byId("size-out").textContent = `${state.size} px`;
    latency.draw();
    resized();
  });
  byId("bar").addEventListener("submit", (event) => event.preventDefault());
}

// Both sides' features in one basis.
let asked = 0;
async function features() {
  if (!bothLooked()) return;
  const mine = (asked += 1);
  const note = byId("colours-note");
  try {
    const looks = sides.map((side) => side.found.look).join(",");
    const found = await getJson(`/api/features?looks=${looks}&layers=${sides.map((side) => side.index).join(",")}`);
    if (mine !== asked) return;
    byId("colours").replaceChildren(...found.pictures.map(({ height, width, rgb: text }, i) => {
      const canvas = el("canvas", { width, height, role: "img", "aria-label": "Features as colours" });
      draw(canvas, rgb(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)), height, width));
      const stage = el("div", { class: "stage" }, canvas);
      stage.style.aspectRatio = `${width} / ${height}`;
      return el("div", { class: "side" }, stage, el("p", { class: "caption" }, `${sides[i].wish.plan}, after ${sides[i].layer.name.replace(/\.[^.]*$/, "")}`));
    }));
    note.textContent = found.shared
      ? "The three main directions of the left side's features as red, green and blue; the right side is drawn in the same directions and on the same scale."
      : "The features have different widths, so each side is drawn in its own three main directions: colours do not compare.";
  } catch (error) {
    if (mine !== asked) return;
    byId("colours").replaceChildren();
    note.textContent = error.message;
  }
}

// How far the two rows are apart, where they are of the same patches.
function apart() {
  const [one, other] = sides.map((side) => side.row);
  const compare = one && other && one.shares.length === other.shares.length && state.show !== "similarity";
  const variation = compare ? one.shares.reduce((sum, share, i) => sum + Math.abs(share - other.shares[i]), 0) / 2 : 0;
  byId("apart").textContent = compare ? `${percent(variation)} of the weight lies elsewhere (total variation between the two rows).` : "";
}

async function changed(side) {
  try {
    await sizesOf();
    latency.forget();
    side.look();
  } catch (error) {
    side.refuse(error);
  }
}
// Resolutions that both models have; the left one's own to begin with.
async function sizesOf() {
  const models = await Promise.all(sides.map((side) => getJson(`/api/model?name=${encodeURIComponent(side.wish.model)}`)));
  const common = models[0].sizes.filter((size) => models[1].sizes.includes(size));
  if (!common.length) throw new Error(`${models[0].name} and ${models[1].name} have no resolution in common`);
  const before = state.size;
  state.sizes = common;
  if (!common.includes(before)) state.size = common.includes(models[0].size) ? models[0].size : common[0];
  Object.assign(byId("size"), { max: common.length - 1, value: common.indexOf(state.size) });
  byId("size-out").textContent = `${state.size} px`;
  if (before && before !== state.size) sides.forEach((side) => side.look());
}

async function begin() {
  themes(byId("theme"));
  takeFiles();
  const offered = await getJson("/api/choices");
  state.mostBytes = offered.most_bytes;
  byId("models").append(...[...offered.models, ...offered.timm].map((value) => el("option", { value })));
  byId("plans").append(...offered.plans.map((value) => el("option", { value })));
  byId("samples").append(...offered.samples.map((name) =>
    el("button", { type: "button", title: name, "data-name": name, "aria-pressed": "false", onclick: () => choose(name) },
      el("img", { src: `/api/samples/${name}`, alt: name, width: 52, height: 52 }))));
  byId("footer").textContent = `linvit ${offered.version}. Everything happens on the machine that serves this page: pictures stay in its memory, and nothing is asked of any other.`;
  const colours = later(120, features);
  const on = {
    wish: changed,
    found: () => { settle(); sides.forEach((side) => side.found && side.follow()); colours(); },
    point: (x, y) => { Object.assign(state, { x, y }); if (state.query === "pointer") follow(); },
    painted: apart,
  };
  sides = offered.sides.map((wish) => new Side(state, { ...wish }, on));
  byId("sides").append(...sides.map((side) => side.node));
  latency = new Latency(state, sides);
  controls();
  await sizesOf();
  latency.draw();
  choose(offered.samples[0]);
}
begin().catch(refuse);
