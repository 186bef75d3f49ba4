// One line above the conversation for what the reader should know, and the dot that says how it is.

import { byId, el } from "./elements.js";

let timer = null;

/** Show a notice: `kind` is good, bad or empty; `action` a label and what it does. */
export function notify(text, { kind = "", action = null, seconds = 0 } = {}) {
  const place = byId("notice");
  clearTimeout(timer);
  const dismiss = () => place.replaceChildren();
  const run = () => {
    dismiss();
    action[1]();
  };
  const buttons = action ? [el("button", { type: "button", className: "quiet", onclick: run }, action[0])] : [];
  buttons.push(el("button", { type: "button", className: "quiet", "aria-label": "Dismiss", onclick: dismiss }, "×"));
  place.replaceChildren(el("div", { className: `notice ${kind}` }, el("span", {}, text), buttons));
  if (seconds) timer = setTimeout(dismiss, seconds * 1000);
}

export const clearNotice = () => byId("notice").replaceChildren();

/** `state` is good, wait or bad. */
export function showStatus(state, text) {
  const place = byId("status");
  if (place.textContent !== text) place.textContent = text;
  place.className = `status ${state}`;
}
