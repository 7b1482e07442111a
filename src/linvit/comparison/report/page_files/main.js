// The controls that everything follows, the legend, the theme, and the first drawing.
function sizesNow() {
  return [...new Set(rowsNow().flatMap((row) => row.speeds.filter((s) => s.chip === state.chip).flatMap((s) => s.ladder.map((t) => t[0]))))].sort((a, b) => a - b);
}
function chipsNow() {
  return [...new Set(rowsNow().flatMap((row) => row.speeds.map((s) => s.chip)))].sort((a, b) => a - b);
}
function settle() {
  const chips = chipsNow();
  if (!chips.includes(state.chip)) state.chip = chips.find((chip) => !D.chips[chip].startsWith("CPU ")) ?? chips[0] ?? 0;
  const sizes = sizesNow();
  if (!sizes.includes(state.size)) state.size = sizes.find((size) => rowsNow().some((row) => row.size === size)) ?? sizes[0] ?? 0;
}
function drawControls() {
  settle();
  const all = patches(), chips = chipsNow(), sizes = sizesNow(), parts = [];
  if (D.settings.length > 1) parts.push(choice("Setting", D.settings.map((s, i) => [i, s.title]), state.setting, (v) => { state.setting = +v; state.patch = ""; firstPatch(); open.clear(); changed(); }, "setting"));
  if (all.length > 1) parts.push(choice("Patch", [["", "all"], ...all.map((p) => [p, `${p} px`])], state.patch, (v) => { state.patch = v; changed(); }, "patch"));
  if (chips.length) parts.push(choice("Device", chips.map((chip) => [chip, D.chips[chip]]), state.chip, (v) => { state.chip = +v; changed(); }, "device"));
  if (sizes.length) parts.push(choice("Timed at", sizes.map((size) => [size, `${size} px`]), state.size, (v) => { state.size = +v; changed(); }, "size"));
  byId("controls").hidden = !parts.length;
  keepFocus(byId("controls"), parts);
}
function keepFocus(holder, parts) {
  const id = holder.contains(document.activeElement) ? document.activeElement.id : "";
  holder.replaceChildren(...parts);
  if (id && byId(id)) byId(id).focus();
}
function drawLegend() {
  const names = [...new Set(rowsNow().map((row) => row.candidate))].sort((a, b) => (b === "softmax") - (a === "softmax") || a.localeCompare(b));
  const buttons = names.map((name) => el("button", { type: "button", id: `legend-${names.indexOf(name)}`, "aria-pressed": String(!state.hidden.has(name)), onclick: () => { if (!state.hidden.delete(name)) state.hidden.add(name); changed(); },
    onpointerenter: () => document.querySelectorAll(".plot").forEach((plot) => light(plot, state.hidden.has(name) ? "" : name)), onpointerleave: () => document.querySelectorAll(".plot").forEach((plot) => light(plot, "")) }, badge(name), name));
  if (names.length > 3) buttons.push(el("button", { type: "button", id: "legend-all", onclick: () => { if (state.hidden.size) state.hidden.clear(); else names.filter((n) => n !== "softmax").forEach((n) => state.hidden.add(n)); changed(); } }, state.hidden.size ? "show all" : "hide all"));
  keepFocus(byId("legend"), buttons);
}
// Most seeds first: the patch size that carries the comparison.
function firstPatch() {
  const runs = (patch) => D.rows.filter((row) => row.setting === state.setting && row.patch === patch && !row.teacher).reduce((n, row) => n + row.runs.length, 0);
  const best = patches().sort((a, b) => runs(b) - runs(a) || a - b);
  state.patch = best.length > 1 && best[0] ? String(best[0]) : "";
}
function drawFilter() {
  const input = el("input", { type: "search", id: "filter", placeholder: "name, paper, patch 4 …", oninput: () => { query = input.value; drawTable(); } });
  byId("table-choices").append(el("label", {}, "Filter", input));
}
const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").title = theme === "auto" ? "Colours as the system has them" : `Always ${theme}`;
  try { localStorage.setItem("linvit-theme", theme); } catch { /* a page from a file may have no memory */ }
}
function remembered() {
  try { const theme = localStorage.getItem("linvit-theme"); return THEMES.includes(theme) ? theme : "auto"; } catch { return "auto"; }
}
byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
setTheme(remembered());

if (D.rows.length) {
  firstPatch();
  listeners.unshift(drawControls, drawLegend);
  drawFilter();
  drawPicks();
  changed();
  let width = document.documentElement.clientWidth, waiting = 0;
  const drawAgain = () => { drawPareto(); drawGrowth(); drawCurves(); drawTable(); };
  const redraw = () => { if (document.documentElement.clientWidth === width) return; width = document.documentElement.clientWidth; drawAgain(); };
  addEventListener("beforeprint", () => { printing = true; drawAgain(); });
  addEventListener("afterprint", () => { printing = false; drawAgain(); });
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip(null); });
} else {
  for (const id of ["tradeoffs", "growth", "learning", "table", "controls", "legend"]) byId(id).hidden = true;
}
