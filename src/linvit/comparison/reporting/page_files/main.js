// The controls that everything follows, the legend, the theme, and the first drawing.
const unique = (values) => [...new Set(values)].sort((a, b) => a - b);
const chipsNow = () => unique(rowsNow().flatMap((row) => row.ladders.map((ladder) => ladder.chip)));
function sizesNow() {
  const ladders = rowsNow().flatMap((row) => row.ladders.filter((ladder) => ladder.chip === state.chip));
  return unique(ladders.flatMap((ladder) => ladder.points.map(({ size }) => size)));
}
// A device and a size that were measured: an accelerator before the CPU, the trained size before others.
function settle() {
  const chips = chipsNow(), gpu = chips.find((chip) => !D.chips[chip].startsWith("CPU "));
  if (!chips.includes(state.chip)) state.chip = gpu ?? chips[0] ?? -1;
  const sizes = sizesNow(), trained = sizes.find((size) => rowsNow().some((row) => row.size === size));
  if (!sizes.includes(state.size)) state.size = trained ?? sizes[0] ?? 0;
}
// The patch size that carries the comparison: the one with the most runs.
function firstPatch() {
  const runs = (patch) => {
    const rows = inSetting().filter((row) => row.patch === patch && !row.teacher);
    return rows.reduce((sum, row) => sum + row.runs.length, 0);
  };
  const best = patches().sort((a, b) => runs(b) - runs(a) || a - b);
  state.patch = best.length > 1 && best[0] ? String(best[0]) : "";
}
function chooseSetting(value) {
  state.setting = Number(value);
  open.clear();
  firstPatch();
  changed();
}
function drawControls() {
  settle();
  const all = patches(), chips = chipsNow(), sizes = sizesNow(), parts = [];
  const set = (name, read) => (value) => {
    state[name] = read(value);
    changed();
  };
  if (D.settings.length > 1) {
    const titles = D.settings.map(({ title }, i) => [i, title]);
    parts.push(choice("Setting", titles, state.setting, chooseSetting, "setting"));
  }
  if (all.length > 1) {
    const options = [["", "all"], ...all.map((patch) => [patch, `${patch} px`])];
    parts.push(choice("Patch", options, state.patch, set("patch", String), "patch"));
  }
  if (chips.length) {
    const names = chips.map((chip) => [chip, D.chips[chip]]);
    parts.push(choice("Device", names, state.chip, set("chip", Number), "device"));
    const options = sizes.map((size) => [size, `${size} px`]);
    parts.push(choice("Timed at", options, state.size, set("size", Number), "size"));
  }
  byId("controls").hidden = !parts.length;
  replaceKeepingFocus(byId("controls"), parts);
}
function replaceKeepingFocus(holder, parts) {
  const id = holder.contains(document.activeElement) ? document.activeElement.id : "";
  holder.replaceChildren(...parts);
  if (id && byId(id)) byId(id).focus();
}
function drawLegend() {
  const found = new Set(rowsNow().map((row) => row.candidate)), plots = document.getElementsByClassName("plot");
  const names = [...found].sort((a, b) => (b === "softmax") - (a === "softmax") || a.localeCompare(b));
  const lightAll = (name) => [...plots].forEach((plot) => light(plot, state.hidden.has(name) ? "" : name));
  const toggle = (name) => {
    if (!state.hidden.delete(name)) state.hidden.add(name);
    changed();
  };
  const toggleAll = () => {
    if (state.hidden.size) state.hidden.clear();
    else names.filter((name) => name !== "softmax").forEach((name) => state.hidden.add(name));
    changed();
  };
  const buttons = names.map((name, i) => {
    const attributes = {
      type: "button",
      id: `legend-${i}`,
      "aria-pressed": String(!state.hidden.has(name)),
      onclick: () => toggle(name),
      onpointerenter: () => lightAll(name),
      onpointerleave: () => lightAll(""),
    };
    return el("button", attributes, badge(name), D.names[name]);
  });
  const all = { type: "button", id: "legend-all", onclick: toggleAll };
  if (names.length > 3) buttons.push(el("button", all, state.hidden.size ? "show all" : "hide all"));
  replaceKeepingFocus(byId("legend"), buttons);
}

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").title = theme === "auto" ? "Colours as the system has them" : `Always ${theme}`;
  try {
    localStorage.setItem("linvit-theme", theme);
  } catch {
    // a page from a file may have no memory
  }
}
function rememberedTheme() {
  try {
    return THEMES.find((theme) => theme === localStorage.getItem("linvit-theme")) || "auto";
  } catch {
    return "auto";
  }
}
byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
setTheme(rememberedTheme());

// A link to a run opens its row.
function followLink() {
  const key = location.hash.replace("#run-", "");
  const id = D.rows.findIndex(({ runs }) => runs.some((run) => run.key === key));
  if (id < 0) return;
  Object.assign(state, { setting: D.rows[id].setting, patch: "" });
  open.add(id);
  changed();
  byId(`run-${key}`).scrollIntoView();
}
function drawAgain() {
  drawPareto();
  drawGrowth();
  drawCurves();
  drawTable();
}
function forPaper(wanted) {
  printing = wanted;
  drawAgain();
}
let width = document.documentElement.clientWidth, waiting = 0;
function resized() {
  if (document.documentElement.clientWidth === width) return;
  width = document.documentElement.clientWidth;
  drawAgain();
}
if (D.rows.length) {
  firstPatch();
  listeners.unshift(drawAnswer, drawControls, drawLegend);
  drawFilter();
  changed();
  followLink();
  addEventListener("hashchange", followLink);
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(resized, 120);
  });
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
} else {
  for (const id of ["tradeoffs", "growth", "learning", "table", "controls", "legend"]) byId(id).hidden = true;
}
