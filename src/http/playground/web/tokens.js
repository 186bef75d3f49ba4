// An answer as its tokens, each coloured by its probability, with what could have stood there.

import { el } from "./elements.js";

// Lower bounds of the classes p4 (sure) to p1; below the last comes p0.
const BOUNDS = [0.95, 0.7, 0.4, 0.15];

export const LEGEND = ["≥ 95 %", "≥ 70 %", "≥ 40 %", "≥ 15 %", "less"];

/** Tokens of a chunk's logprobs. Characters that are split over tokens show where they end. `starts`
 * are the places among them at which steps of the engine begin: one that verifies drafts gives
 * several tokens, and a chunk has those of several steps where the reader was slow. */
export class TokenReader {
  #decoder = new TextDecoder();
  #step = 0;

  read(entries, starts) {
    return entries.map((entry, place) => ({
      text: this.#decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true }),
      probability: Math.exp(entry.logprob),
      // A server that does not say where steps begin says nothing of what came together.
      step: starts && (this.#step += starts.includes(place) ? 1 : 0),
      others: entry.top_logprobs.map((other) => ({
        text: other.token,
        probability: Math.exp(other.logprob),
      })),
    }));
  }
}

export function classOf(probability) {
  const place = BOUNDS.findIndex((bound) => probability >= bound);
  return `p${place === -1 ? 0 : 4 - place}`;
}

/** Shows tokens, and beside the one that is pointed at or chosen by arrow keys what else it was. */
export class TokenView {
  #tokens = [];
  #active = -1;

  constructor() {
    const label = "Tokens by probability. Arrow keys choose one.";
    const listeners = { onpointerover: (event) => this.#point(event), onkeydown: (e) => this.#key(e) };
    listeners.onpointerleave = () => this.#choose(-1);
    listeners.onblur = () => this.#choose(-1);
    const props = { className: "tokens", tabIndex: 0, role: "group", "aria-label": label };
    this.text = el("div", { ...props, ...listeners });
    this.card = el("div", { className: "alternatives", role: "status", hidden: true });
    this.node = el("div", { className: "token-view" }, this.text, this.card);
  }

  /** Show these tokens; those that were shown stay. `content` is the text that the answer has. */
  update(tokens, content) {
    for (const token of tokens.slice(this.#tokens.length)) {
      const span = el("span", { className: `token ${classOf(token.probability)}` }, token.text);
      span.dataset.index = this.#tokens.length;
      const before = this.text.lastChild;
      if (token.step !== undefined && token.step === this.#tokens.at(-1)?.step) {
        if (!before.classList.contains("together")) before.classList.add("together", "first");
        span.classList.add("together");
      }
      this.text.append(span);
      this.#tokens.push(token);
    }
    // The token that ends an answer, or what a stop string took away, is no part of its text.
    const text = tokens.map((token) => token.text).join("");
    let begin = text.length;
    for (let i = tokens.length - 1; content !== null && i >= 0 && text.startsWith(content); i -= 1) {
      begin -= tokens[i].text.length;
      if (begin < content.length) break;
      this.text.children[i].classList.toggle("after", tokens[i].text !== "");
    }
  }

  #point(event) {
    const index = event.target.dataset?.index;
    if (index !== undefined) this.#choose(Number(index));
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.#choose(-1);
    if (step === undefined) return;
    event.preventDefault();
    const last = this.#tokens.length - 1;
    this.#choose(Math.min(last, Math.max(0, this.#active + step)));
  }

  #choose(index) {
    this.text.children[this.#active]?.classList.remove("active");
    this.#active = index;
    this.card.hidden = index < 0;
    if (index < 0) return;
    const span = this.text.children[index];
    span.classList.add("active");
    this.card.replaceChildren(...rows(this.#tokens[index]));
    const room = this.node.clientWidth - this.card.offsetWidth;
    this.card.style.left = `${Math.max(0, Math.min(span.offsetLeft, room))}px`;
    this.card.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
  }
}

function rows(token) {
  const chosen = token.others.some((other) => other.text === token.text);
  const shown = chosen ? token.others : [token, ...token.others];
  return shown.map((other) => {
    const share = el("span", { className: "share" }, `${(other.probability * 100).toFixed(1)} %`);
    const meter = el("meter", { value: other.probability, "aria-hidden": "true" });
    const name = el("code", {}, visible(other.text));
    return el("div", { className: other.text === token.text ? "row chosen" : "row" }, name, meter, share);
  });
}

/** White space as signs: a token may be nothing else. */
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
