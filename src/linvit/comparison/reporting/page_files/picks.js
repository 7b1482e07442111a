// The answer about the setting shown, with names set off, and below it: what to take at each token count, for what one is ready to give up.
const picking = { tolerance: 1, clock: "" };
const clockOf = (ladder) => `${ladder.chip} ${ladder.many}`;
function drawAnswer() {
  const { answer, facts } = D.settings[state.setting];
  const parts = answer.map((sentence) => sentence.map((part, i) => (i % 2 ? el("b", {}, part) : part)));
  byId("lead").replaceChildren(...parts.map((said, i) => el(i ? "p" : "h1", { id: i ? null : "title" }, said)));
  byId("facts").textContent = facts;
  drawPicks();
}
function drawPicks() {
  const holder = byId("picks");
  const ladders = D.picks.filter((ladder) => ladder.setting === state.setting && ladder.picks.length);
  if (!ladders.length) return holder.replaceChildren();
  const clocks = [...new Map(ladders.map((ladder) => [clockOf(ladder), ladder])).entries()];
  if (!clocks.some(([key]) => key === picking.clock)) picking.clock = clocks[0][0];
  const chosen = ladders.find((ladder) => clockOf(ladder) === picking.clock && ladder.tolerance === picking.tolerance);
  const tolerances = [...new Set(ladders.map((ladder) => ladder.tolerance))].map((t) => [t, plural(t, "point")]);
  const devices = clocks.map(([key, ladder]) => {
    return [key, `${D.chips[ladder.chip]}, ${ladder.many ? `batches of ${ladder.batch}` : "one image"}`];
  });
  holder.replaceChildren(
    chips("Fastest, giving up at most", "tolerance", tolerances),
    chips("on", "clock", devices),
    el("ol", { class: "picks" }, chosen ? chosen.picks.map(aPick) : []),
  );
}
function chips(label, name, options) {
  const press = (value) => {
    picking[name] = value;
    drawPicks();
    byId("picks").querySelector(`[data-chip="${CSS.escape(`${name} ${value}`)}"]`).focus();
  };
  const buttons = options.map(([value, text]) => {
    const pressed = String(value === picking[name]), onclick = () => press(value);
    return el("button", { type: "button", "aria-pressed": pressed, "data-chip": `${name} ${value}`, onclick }, text);
  });
  return el("div", { class: "chips", role: "group", "aria-label": label }, label, buttons);
}
function aPick({ tokens, size, row: place, ratio, rivals, lost }) {
  const row = D.rows[place] || { candidate: "softmax", name: "softmax" }, lines = [];
  if (row.candidate === "softmax") lines.push("nothing is clearly faster");
  else {
    lines.push(known(ratio) ? `${three(ratio)}× softmax's speed` : lost);
    if (row.delta) lines.push(`${signed(row.delta.mean)} points ${bounds(row.delta.interval)}`);
    const others = rivals.length > 3 ? [...rivals.slice(0, 3), `${rivals.length - 3} more`] : rivals;
    if (others.length) lines.push(`as fast: ${others.join(", ")}`);
  }
  return el(
    "li",
    {},
    el("span", {}, `${whole(tokens)} tokens · ${size} px`),
    el("span", { class: "who" }, badge(row.candidate), row.name),
    lines.map((line) => el("span", {}, line)),
  );
}
