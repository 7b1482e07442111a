// What everything else uses: elements made without markup, requests, and work that tells how far it is.
export const byId = (id) => document.getElementById(id);

// el("p", {class: "x"}, "text", child): text becomes text nodes, so no name is ever read as markup.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}
export const aborted = (error) => error.name === "AbortError";

async function answered(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (aborted(error)) throw error;
    throw new Refusal("the server does not answer: is linvit serve still running?", 0);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Refusal(told.error || `the server refused (${response.status})`, response.status);
}
export const getJson = async (address, signal) => (await answered(address, { signal })).json();
export const getBytes = async (address, signal) => (await answered(address, { signal })).arrayBuffer();
export const sendFile = async (address, body) => (await answered(address, { method: "POST", body })).json();

// Long work: lines of JSON, told as they come; the last is what was found. To abort is to cancel.
export async function work(address, asked, tell, signal) {
  const response = await answered(address, { method: "POST", body: JSON.stringify(asked), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let found = null;
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value || "")).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.error) throw new Refusal(event.error, 422);
      if (event.found) found = event.found;
      else tell(event);
    }
    if (done && found) return found;
    if (done) throw new Refusal("the server ended the work", 0);
  }
}

export const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 ? 0 : 1)} %`;
export function three(x) {
  const digits = Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 2;
  return x.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

// Chips of which one is pressed.
export function chips(node, options, value, choose) {
  const buttons = options.map(([key, text, hint]) =>
    el("button", { type: "button", title: hint, "aria-pressed": String(key === value), onclick: () => press(key) }, text));
  function press(key) {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === key)));
    choose(key);
  }
  node.replaceChildren(...buttons);
}

export function themes(button) {
  const order = ["auto", "light", "dark"];
  let at = 0;
  button.addEventListener("click", () => {
    at = (at + 1) % order.length;
    if (at) document.documentElement.dataset.theme = order[at];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${order[at]}`;
  });
}
