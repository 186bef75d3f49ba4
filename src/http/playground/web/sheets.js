// The two sheets beside the conversation, the theme, and the dialog that asks for keys.

import { byId, el } from "./elements.js";
import { loadTheme, saveTheme } from "./store.js";

const WIDE = matchMedia("(min-width: 1100px)");
const THEMES = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };

/** A sheet with its button. On a narrow screen it covers the conversation, one at a time. */
export class Sheet {
  static #all = [];

  constructor(name, open, onchange = () => {}) {
    this.node = byId(name);
    this.button = byId(`${name}-button`);
    this.onchange = onchange;
    Sheet.#all.push(this);
    this.button.addEventListener("click", () => this.set(this.node.hidden));
    this.node.querySelector(".close").addEventListener("click", () => this.#leave());
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#leave();
    });
    // A window that is made narrow shows the conversation first.
    WIDE.addEventListener("change", () => WIDE.matches || this.set(false));
    this.set(open && WIDE.matches);
  }

  set(open) {
    if (open && !WIDE.matches) for (const other of Sheet.#all) if (other !== this) other.set(false);
    this.node.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle(`with-${this.node.id}`, open);
    if (open && !WIDE.matches) this.node.querySelector(".close").focus();
    this.onchange(open);
  }

  #leave() {
    this.set(false);
    this.button.focus();
  }
}

/** The button that goes through system, light and dark. */
export function setUpTheme(button) {
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.title = THEMES[theme];
    button.setAttribute("aria-label", THEMES[theme]);
  };
  const names = Object.keys(THEMES);
  apply(names.includes(loadTheme()) ? loadTheme() : "auto");
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    saveTheme(next);
    apply(next);
  });
}

/** Asks for keys; calls `save` with what was typed. */
export class KeyDialog {
  constructor(save) {
    this.node = byId("keys");
    this.form = this.node.querySelector("form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(save);
    });
    byId("keys-cancel").addEventListener("click", () => this.node.close());
  }

  open(keys, problem = "") {
    this.form.elements.api.value = keys.api;
    this.form.elements.admin.value = keys.admin;
    byId("keys-problem").textContent = problem;
    if (!this.node.open) this.node.showModal();
  }

  #submit(save) {
    const { api, admin } = this.form.elements;
    const keys = { api: api.value.trim(), admin: admin.value.trim() };
    // What a header can carry.
    if (Object.values(keys).some((key) => !/^[!-~]{0,4096}$/.test(key))) {
      byId("keys-problem").replaceChildren(el("span", {}, "A key has printable characters and no space."));
      return;
    }
    this.node.close();
    save(keys);
  }
}
