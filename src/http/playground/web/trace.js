// Where an answer's time went: as the page saw it, and as the engine did where it may be asked.

import { el, figure, seconds, svg } from "./elements.js";
import { Metrics } from "./metrics.js";

/** Measures one answer in the page. Times are seconds since the request was sent. */
export class Stopwatch {
  #sent = performance.now();
  first = null;
  last = null;
  opened = null;

  #now = () => (performance.now() - this.#sent) / 1000;
  open = () => (this.opened = this.#now());

  /** A piece of the answer came. */
  mark() {
    this.last = this.#now();
    this.first ??= this.last;
  }

  /** `steps`: of the engine, which this answer's tokens are of; 0 where nobody said. */
  trace(usage, steps) {
    const output = usage?.completion_tokens ?? null;
    const decode = this.first === null ? null : this.last - this.first;
    return {
      first: this.first,
      decode,
      total: this.#now(),
      output,
      steps,
      prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
      reasoning: usage?.completion_tokens_details?.reasoning_tokens ?? null,
      rate: rate(output, decode),
      engine: null,
    };
  }
}

const rate = (output, decode) => (output > 1 && decode > 0 ? (output - 1) / decode : null);

const HISTOGRAMS = {
  queue: "vllm:request_queue_time_seconds",
  prefill: "vllm:request_prefill_time_seconds",
  decode: "vllm:request_decode_time_seconds",
};

/**
 * What the engine says of the request `id`: its record, with the admin key, or else what the
 * metrics counted since `before` if that was one request alone. Null where neither tells.
 */
export async function engineTrace(api, id, before) {
  if (api.keys.admin) {
    const track = await recorded(api, id).catch(() => null);
    if (track) return track;
  }
  if (before === null) return null;
  // The end of a request may be counted just after its last event was sent.
  for (const pause of [0, 200]) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    const found = await counted(api, before).catch(() => null);
    if (found) return found;
  }
  return null;
}

async function recorded(api, id) {
  const path = "debug/timeline?format=records&steps=64";
  const { requests } = await api.json(path, { key: api.keys.admin });
  const track = requests.find((request) => request.request_id === id);
  if (!track || track.first_token === null || track.admitted.length === 0) return null;
  return {
    source: "its record",
    queue: track.admitted[0] - track.queued,
    prefill: track.first_token - track.admitted[0],
    decode: track.last_token - track.first_token,
    rate: rate(track.num_tokens, track.last_token - track.first_token),
  };
}

async function counted(api, before) {
  const after = new Metrics(await (await api.get("metrics")).text());
  const grown = (name) => after.total(name) - before.total(name);
  const same = grown("process_start_time_seconds") === 0;
  if (!same || grown(`${HISTOGRAMS.queue}_count`) !== 1 || grown("vllm:e2e_request_latency_seconds_count") !== 1)
    return null;
  const [queue, prefill, decode] = Object.values(HISTOGRAMS).map((name) => grown(`${name}_sum`));
  const tokens = grown("vllm:request_generation_tokens_sum");
  return { source: "its metrics", queue, prefill, decode, rate: rate(tokens, decode) };
}

/** How many steps gave the answer's tokens. Guesses that were right make them fewer. */
function stepsOf({ steps, output }) {
  if (output === null) return figure(steps);
  return `${figure(steps)}, ${(output / steps).toFixed(1)} tokens in each`;
}

/** One line with a bar; opens into a table. */
export function traceView(trace) {
  const { engine } = trace;
  const speed = engine?.rate ?? trace.rate;
  const words = [`first token ${seconds(trace.first)}`];
  if (speed !== null) words.push(`${figure(speed)} tokens/s`);
  if (trace.output !== null) words.push(`${figure(trace.output)} tokens`);
  const summary = el("summary", {}, bar(trace), el("span", {}, words.join(" · ")));
  return el("details", { className: "trace" }, summary, table(trace));
}

function bar({ first, decode, engine }) {
  const parts = engine
    ? [["queue", engine.queue], ["prefill", engine.prefill], ["decode", engine.decode]]
    : [["prefill", first], ["decode", decode]];
  const whole = parts.reduce((sum, [, time]) => sum + (time ?? 0), 0) || 1;
  let x = 0;
  const pieces = parts.map(([name, time]) => {
    const width = ((time ?? 0) / whole) * 100;
    const piece = svg("rect", { class: `phase-${name}`, x, y: 0, width, height: 8 });
    x += width;
    return piece;
  });
  const attributes = { class: "trace-bar", viewBox: "0 0 100 8", preserveAspectRatio: "none" };
  return svg("svg", { ...attributes, "aria-hidden": "true" }, ...pieces);
}

function table(trace) {
  const { engine } = trace;
  const cached = trace.cached ? `, ${figure(trace.cached)} of them cached` : "";
  const rows = [
    ["Prompt", trace.prompt === null ? "–" : `${figure(trace.prompt)} tokens${cached}`],
    ["Answer", trace.output === null ? "–" : `${figure(trace.output)} tokens`],
  ];
  if (trace.steps) rows.push(["Steps", stepsOf(trace)]);
  if (trace.reasoning) rows.push(["of it reasoning", `${figure(trace.reasoning)} tokens`]);
  if (engine) {
    rows.push(["Queue", seconds(engine.queue), "queue"], ["Prefill", seconds(engine.prefill), "prefill"]);
    rows.push(["Decode", seconds(engine.decode), "decode"]);
    if (engine.rate !== null) rows.push(["Tokens per second", figure(engine.rate)]);
  }
  rows.push(["First token, seen here", seconds(trace.first)], ["Whole answer, seen here", seconds(trace.total)]);
  if (trace.rate !== null) rows.push(["Tokens per second, seen here", figure(trace.rate)]);
  const note = engine
    ? `Queue, prefill and decode: the engine's clock, from ${engine.source}.`
    : "Measured in this page: the engine's own figures were not to be had.";
  const body = rows.map(([name, value, phase]) => {
    const mark = phase ? el("span", { className: `mark phase-${phase}`, "aria-hidden": "true" }) : null;
    return el("tr", {}, el("th", { scope: "row" }, mark, name), el("td", {}, value));
  });
  return el("div", { className: "trace-table" }, el("table", {}, el("tbody", {}, body)), el("p", {}, note));
}
