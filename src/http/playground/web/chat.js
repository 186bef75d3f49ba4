// The conversation and the one answer that is being streamed into it.

import { ApiError, isAbort } from "./api.js";
import { TokenReader } from "./tokens.js";
import { engineTrace, Stopwatch } from "./trace.js";

const ALTERNATIVES = 5;

/**
 * Turns are plain objects, which storage can keep:
 * user {content}; tool {id, name, content}; assistant {content, reasoning, calls, tokens, steps,
 * finish, problem, trace, busy}.
 */
export class Chat {
  #stopper = null;

  /** `options` gives model, system, request() and probabilities; `watch` the last metrics. */
  constructor(api, watch, options, turns) {
    Object.assign(this, { api, watch, options, turns });
    // Called with a turn that has changed, or nothing when the list has.
    this.onchange = () => {};
    this.onfailure = () => {};
  }

  get busy() {
    return this.#stopper !== null;
  }

  /** Ask; raises FieldError before anything is changed. */
  async ask(content) {
    const request = this.options.request();
    this.turns.push({ role: "user", content });
    await this.#answer(request);
  }

  /** Answer again what stands before this turn. */
  async regenerate(turn) {
    const request = this.options.request();
    this.turns.splice(this.turns.indexOf(turn));
    await this.#answer(request);
  }

  /** Put another text in the place of a question, and forget what followed. */
  async edit(turn, content) {
    const request = this.options.request();
    this.turns.splice(this.turns.indexOf(turn), Infinity, { role: "user", content });
    await this.#answer(request);
  }

  /** Give the results of an answer's calls, in their order. */
  async results(turn, contents) {
    const request = this.options.request();
    this.turns.splice(this.turns.indexOf(turn) + 1);
    turn.calls.forEach(({ id, name }, i) => this.turns.push({ role: "tool", id, name, content: contents[i] }));
    await this.#answer(request);
  }

  stop() {
    this.#stopper?.abort();
  }

  clear() {
    this.stop();
    const turns = this.turns.splice(0);
    this.onchange();
    return turns;
  }

  restore(turns) {
    this.turns.splice(0, Infinity, ...turns);
    this.onchange();
  }

  async #answer(request) {
    const stopper = new AbortController();
    this.#stopper = stopper;
    const messages = this.#messages();
    const turn = { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], steps: 0, busy: true };
    this.turns.push(turn);
    this.onchange();
    const body = { model: this.options.model, messages, stream: true, ...request };
    body.stream_options = { include_usage: true, include_steps: true };
    if (this.options.probabilities) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    const id = `page-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
    const before = this.watch.metrics;
    const stopwatch = new Stopwatch();
    let usage = null;
    try {
      const call = { signal: stopper.signal, id, opened: stopwatch.open };
      const reader = new TokenReader();
      for await (const chunk of this.api.stream(body, call)) {
        usage = chunk.usage ?? usage;
        if (chunk.choices.length && take(turn, chunk.choices[0], reader)) stopwatch.mark();
        this.onchange(turn);
      }
    } catch (error) {
      if (!isAbort(error) && !(error instanceof ApiError)) throw error;
      turn.problem = isAbort(error) ? "" : error.message;
      turn.finish = isAbort(error) ? "stopped" : "failed";
      if (!isAbort(error)) this.onfailure(error);
    } finally {
      turn.busy = false;
      if (this.#stopper === stopper) this.#stopper = null;
      if (stopwatch.first !== null) turn.trace = stopwatch.trace(usage, turn.steps);
      this.onchange(turn);
    }
    if (usage !== null && turn.trace) {
      turn.trace.engine = await engineTrace(this.api, id, before);
      this.onchange(turn);
    }
  }

  #messages() {
    const { system } = this.options;
    const head = system ? [{ role: "system", content: system }] : [];
    return [...head, ...this.turns.filter((turn) => !isVoid(turn)).map(message)];
  }
}

/** An answer that failed before its first word is not part of what is sent. */
const isVoid = (turn) => turn.role === "assistant" && !turn.content && !turn.calls.length;

function message(turn) {
  if (turn.role === "user") return { role: "user", content: turn.content };
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.content };
  const said = { role: "assistant", content: turn.content || null };
  if (turn.calls.length) {
    said.tool_calls = turn.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return said;
}

/** Add a chunk's choice to a turn; whether it brought anything. */
function take(turn, { delta, logprobs, finish_reason: finish, step_starts: starts }, reader) {
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  turn.reasoning += reasoning;
  turn.content += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) {
    turn.calls[call.index] ??= { id: "", name: "", arguments: "" };
    const known = turn.calls[call.index];
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (logprobs?.content) turn.tokens.push(...reader.read(logprobs.content, starts));
  turn.steps += starts?.length ?? 0;
  if (finish) turn.finish = finish;
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}
