// Inside an opened row: all its numbers, and each run with its config, its environment and the command that repeats it.
function inside(row) {
  const line = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  const numbers = pairsOf(row).filter(([, value]) => value), timing = D.timed[row.key];
  return el(
    "div",
    { class: "inside" },
    el("dl", { class: "numbers" }, numbers.map(line)),
    ofClasses(row),
    row.runs.map((run) => aRun(row, run)),
    timing ? el("div", { class: "run" }, el("h3", {}, "Speeds"), command(timing)) : null,
  );
}
// The metric of each class, best first.
function ofClasses(row) {
  const found = Object.entries(row.per_class).sort((a, b) => b[1] - a[1]);
  if (!found.length) return null;
  const lines = found.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, `${percent(value)} %`)));
  const title = `${metric() === "mAP" ? "AP" : "IoU"} of each class`;
  return el("details", {}, el("summary", {}, title), el("dl", { class: "numbers" }, lines));
}
function pairsOf(row) {
  const { delta, training } = row;
  const pairs = [
    ["Candidate", row.candidate],
    ["Paper", row.paper],
    ["Top-5", known(row.top5) ? `${percent(row.top5, 2)} %` : ""],
    ...Object.entries(row.metrics).map(([name, value]) => [name.replaceAll("_", " "), `${percent(value, 2)} %`]),
    ["Best epoch, mean", `${percent(row.best, 2)} %`],
    ["Standard error over seeds", known(row.error) ? three(row.error) : "one seed"],
  ];
  if (delta) {
    const images = delta.images ? `, ${whole(delta.images)} images` : "";
    pairs.push([`Δ to ${delta.against}, these images`, `${signed(delta.mean, 2)} ${bounds(delta.seeds_interval)}`]);
    pairs.push(["Paired over", plural(delta.seeds, "seed") + images]);
  }
  for (const [dtype, drift] of Object.entries(row.drift).filter(([, found]) => found)) {
    const { relative_rms: rms, agreement, finite } = drift;
    const said = finite ? `${three(100 * rms)} % rms, agrees ${percent(agreement)} %` : "not finite";
    pairs.push([`Drift ${dtype}`, said]);
  }
  pairs.push(["Training", seconds(training.seconds) + (training.shared > 1 ? ", device shared" : "")]);
  pairs.push(["Training memory", known(training.peak_bytes) ? bytes(training.peak_bytes) : ""]);
  for (const speed of row.ladders.filter(({ time }) => time)) {
    const how = `${speed.what}${speed.many ? "" : ", one image"}`;
    pairs.push([`Exponent, ${D.chips[speed.chip]}, ${how}`, exponent(speed.time)]);
  }
  return pairs;
}
function aRun(row, run) {
  const environment = D.environments[run.environment], config = { seed: run.seed, ...D.configs[run.config] };
  const about = [`${percent(run.score, 2)} %`, environment.hardware, run.when, seconds(run.seconds), ""];
  const title = row.teacher ? "Teacher " : `Seed ${run.seed} `, link = el("a", { href: `#run-${run.key}` }, run.key);
  return el(
    "div",
    { class: "run", id: `run-${run.key}` },
    el("h3", {}, title, el("span", {}, about.filter(known).join(" · "), link)),
    command(run.command),
    run.conversion ? el("p", { class: "pm" }, run.conversion) : null,
    el("details", {}, el("summary", {}, "Config"), el("pre", {}, listed(config))),
    el("details", {}, el("summary", {}, "Environment"), el("pre", {}, listed(environment))),
  );
}
function command(text) {
  if (!text) return null;
  const button = el("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text)) ? "Copied" : "Select and copy";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
  return el("div", { class: "command" }, el("pre", {}, text), button);
}
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", {}, text); // a page from a file may not touch the clipboard itself
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
