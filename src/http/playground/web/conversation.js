// The list of turns, which follows the newest text while the reader is at its end.

import { el } from "./elements.js";
import { AnswerView, QuestionView, ResultView } from "./turn.js";

const SUGGESTIONS = ["Tell me a story about a fox.", "Sort these words: pear, apple, plum, fig.", "What is 17 + 25?"];
// Milliseconds between two drawings of a streamed answer.
const FRAME = 40;
const NEAR = 80;

export class Conversation {
  #views = new Map();
  #due = new Set();
  #timer = null;

  constructor(list, chat, actions) {
    Object.assign(this, { list, chat });
    this.scroller = list.parentElement;
    this.actions = {
      ...actions,
      busy: () => chat.busy,
      answered: (turn) => chat.turns[chat.turns.indexOf(turn) + 1]?.role === "tool",
    };
    this.render();
  }

  /** Draw one turn soon, or the whole list now. */
  changed(turn) {
    if (turn === undefined) this.render();
    else {
      this.#due.add(turn);
      this.#timer ??= setTimeout(() => this.#draw(), FRAME);
    }
  }

  render() {
    const { turns } = this.chat;
    for (const turn of this.#views.keys()) if (!turns.includes(turn)) this.#views.delete(turn);
    for (const turn of turns) {
      if (!this.#views.has(turn)) this.#views.set(turn, this.#view(turn));
      else if (turn.role === "assistant") this.#views.get(turn).update();
    }
    const nodes = turns.map((turn) => this.#views.get(turn).node);
    this.list.replaceChildren(...(nodes.length ? nodes : [this.#welcome()]));
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #draw() {
    this.#timer = null;
    const { scroller } = this;
    const follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    for (const turn of this.#due) this.#views.get(turn)?.update();
    this.#due.clear();
    this.list.setAttribute("aria-busy", String(this.chat.busy));
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  #view(turn) {
    if (turn.role === "user") return new QuestionView(turn, this.actions);
    return turn.role === "tool" ? new ResultView(turn) : new AnswerView(turn, this.actions);
  }

  #welcome() {
    const ask = (text) => el("button", { type: "button", onclick: () => this.actions.ask(text) }, text);
    const lead = "What you write goes to this server and nowhere else.";
    return el(
      "div",
      { className: "welcome" },
      el("h2", {}, "What shall we talk about?"),
      el("p", {}, lead),
      el("div", { className: "suggestions" }, SUGGESTIONS.map(ask)),
    );
  }
}
