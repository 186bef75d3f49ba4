// One turn of the conversation on the screen.

import { copyButton, el } from "./elements.js";
import { blocks, render } from "./markdown.js";
import { TokenView } from "./tokens.js";
import { traceView } from "./trace.js";

const FINISHES = {
  length: "Ended at the most tokens that were allowed.",
  stopped: "Stopped.",
  failed: "Not finished.",
};

const button = (label, onclick) => el("button", { type: "button", className: "quiet", onclick }, label);

/** A question: its text, which can be edited. */
export class QuestionView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.node = el("article", { className: "turn user", "aria-label": "You" });
    this.update();
  }

  update() {
    const text = el("div", { className: "bubble" }, this.turn.content);
    const tools = el("div", { className: "actions" }, button("Edit", () => this.#edit()));
    this.node.replaceChildren(text, tools);
  }

  #edit() {
    if (this.actions.busy()) return;
    const props = { value: this.turn.content, rows: 3, "aria-label": "Your question" };
    const area = el("textarea", props);
    const save = () => this.actions.edit(this.turn, area.value.trim());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.update();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    const send = el("button", { type: "button", className: "primary", onclick: save }, "Ask again");
    const row = el("div", { className: "actions shown" }, send, button("Cancel", () => this.update()));
    this.node.replaceChildren(area, row);
    area.focus();
  }
}

/** What a tool said. */
export class ResultView {
  constructor(turn) {
    const head = el("p", { className: "call-head" }, "Result of ", el("code", {}, turn.name));
    const props = { className: "turn result", "aria-label": `Result of ${turn.name}` };
    this.node = el("article", props, head, el("pre", { tabIndex: 0 }, turn.content));
  }

  update() {}
}

/** An answer: reasoning, text or coloured tokens, calls, and its trace. */
export class AnswerView {
  #sources = [];
  #tokenView = null;
  #calls = "";
  #foot = "";

  constructor(turn, actions) {
    Object.assign(this, { turn, actions });
    const summary = el("summary", {}, "Reasoning");
    this.thought = el("div", { className: "thought" });
    this.reasoning = el("details", { className: "reasoning", hidden: true }, summary, this.thought);
    this.text = el("div", { className: "text" });
    this.calls = el("div", { className: "calls" });
    this.foot = el("div", { className: "foot" });
    const parts = [this.reasoning, this.text, this.calls, this.foot];
    this.node = el("article", { className: "turn assistant", "aria-label": "Answer" }, parts);
    this.update();
  }

  update() {
    const { turn } = this;
    this.node.classList.toggle("busy", Boolean(turn.busy));
    this.reasoning.hidden = !turn.reasoning;
    if (this.thought.textContent !== turn.reasoning) this.thought.textContent = turn.reasoning;
    this.#showText();
    this.#showCalls();
    this.#showFoot();
  }

  #showText() {
    const coloured = this.actions.coloured() && this.turn.tokens?.length > 0;
    if (coloured) {
      if (this.#tokenView === null) {
        this.#tokenView = new TokenView();
        this.#sources = [];
        this.text.replaceChildren(this.#tokenView.node);
      }
      this.#tokenView.update(this.turn.tokens, this.turn.busy ? null : this.turn.content);
      return;
    }
    if (this.#tokenView !== null) this.text.replaceChildren();
    this.#tokenView = null;
    // Blocks that did not change stay, and so does what the reader has marked in them.
    const sources = blocks(this.turn.content);
    const same = this.#sources.findIndex((source, i) => source !== sources[i]);
    const kept = same === -1 ? this.#sources.length : same;
    while (this.text.children.length > kept) this.text.lastChild.remove();
    this.text.append(...sources.slice(kept).map(render));
    this.#sources = sources;
  }

  #showCalls() {
    const { calls, busy } = this.turn;
    const answered = this.actions.answered(this.turn);
    const state = JSON.stringify([calls, busy, answered]);
    if (state === this.#calls) return;
    this.#calls = state;
    const areas = [];
    const cards = calls.map((call) => {
      const head = el("p", { className: "call-head" }, "Calls ", el("code", {}, call.name));
      const card = el("div", { className: "call" }, head, el("pre", { tabIndex: 0 }, pretty(call.arguments)));
      if (busy || answered) return card;
      const area = el("textarea", { rows: 2, placeholder: "What the tool answers" });
      area.setAttribute("aria-label", `Result of ${call.name}`);
      areas.push(area);
      card.append(area);
      return card;
    });
    const send = () => this.actions.results(this.turn, areas.map((area) => area.value));
    if (areas.length) {
      const label = areas.length > 1 ? "Send the results" : "Send the result";
      cards.push(el("button", { type: "button", className: "primary", onclick: send }, label));
    }
    this.calls.replaceChildren(...cards);
  }

  #showFoot() {
    const { turn } = this;
    const state = JSON.stringify([turn.busy, turn.problem, turn.finish, turn.trace]);
    if (state === this.#foot) return;
    this.#foot = state;
    if (turn.busy) {
      this.foot.replaceChildren();
      return;
    }
    const open = this.foot.querySelector(".trace")?.open ?? false;
    const note = turn.problem || FINISHES[turn.finish] || "";
    const kind = turn.problem ? "note bad" : "note";
    const trace = turn.trace ? traceView(turn.trace) : null;
    if (trace) trace.open = open;
    const again = button(turn.problem ? "Try again" : "Regenerate", () => this.actions.regenerate(turn));
    const tools = el("div", { className: "actions" }, copyButton(() => turn.content || JSON.stringify(turn.calls)), again);
    const said = note ? el("p", { className: kind, role: turn.problem ? "alert" : null }, note) : null;
    this.foot.replaceChildren(...[said, trace, tools].filter(Boolean));
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
