// The engine, live: requests, memory, speed, and where a step's time goes.

import { bytes, el, figure, percent, seconds, svg } from "./elements.js";
import { drawTimeline, spanOf } from "./timeline.js";

const PHASES = ["plan", "launch", "queue", "device", "return", "commit", "publish"];
const KEPT = 60;

export class Panel {
  #rates = [];
  #steps = "";
  #phases = null;

  constructor(place, watch, openKeys) {
    Object.assign(this, { place, watch, openKeys });
    const part = (className) => el("section", { className });
    this.parts = Object.fromEntries(["tiles", "speed", "phases", "steps", "memory"].map((name) => [name, part(name)]));
    place.append(...Object.values(this.parts));
  }

  /** Draw what was last seen. */
  draw() {
    const { metrics, access } = this.watch;
    if (metrics === null) {
      this.#rates = [];
      const locked = access.metrics === "locked";
      const text = locked ? "The figures of the engine need a key." : "No figures of the engine yet.";
      const button = locked ? el("button", { type: "button", onclick: this.openKeys }, "Enter a key") : null;
      for (const part of Object.values(this.parts)) part.replaceChildren();
      this.parts.tiles.replaceChildren(el("p", { className: "muted" }, text), ...(button ? [button] : []));
      return;
    }
    this.#drawTiles(metrics);
    this.#drawSpeed();
    this.#drawPhases();
    this.#drawSteps();
    this.#drawMemory();
  }

  #drawTiles(metrics) {
    const hits = metrics.total("vllm:prefix_cache_hits_total");
    const asked = metrics.total("vllm:prefix_cache_queries_total");
    const tiles = [
      ["Running", figure(metrics.total("vllm:num_requests_running"))],
      ["Waiting", figure(metrics.total("vllm:num_requests_waiting"))],
      ["KV in use", percent(metrics.total("vllm:kv_cache_usage_perc"))],
      ["Prefix hits", percent(hits / asked)],
      ["Bubble", percent(metrics.total("slipstream_device_bubble_ratio"))],
      ["Preempted", figure(metrics.total("vllm:num_preemptions_total"))],
    ];
    const nodes = tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    this.parts.tiles.replaceChildren(el("dl", {}, nodes));
  }

  #drawSpeed() {
    const output = this.#rate("vllm:generation_tokens_total");
    if (output === null) return;
    const prompt = this.#rate("vllm:prompt_tokens_total");
    // A model that only reads has nothing to show of what it writes.
    const writes = this.watch.metrics.total("vllm:generation_tokens_total") > 0;
    this.#rates = [...this.#rates, writes ? output : prompt].slice(-KEPT);
    const most = Math.max(...this.#rates, 1);
    const points = this.#rates.map((rate, i) => `${KEPT - this.#rates.length + i},${22 - (rate / most) * 20}`);
    const line = svg("polyline", { points: points.join(" ") });
    const attributes = { class: "spark", viewBox: `0 0 ${KEPT - 1} 24`, preserveAspectRatio: "none", role: "img" };
    attributes["aria-label"] = `Tokens per second, at most ${figure(most)}`;
    let words = `${figure(output)} written, ${figure(prompt)} read; peak ${figure(Math.max(...this.#rates))}`;
    // Speculation: guesses of next tokens that a step verified, and those that were right.
    const drafted = this.#rate("vllm:spec_decode_num_draft_tokens_total");
    if (drafted > 0) {
      const accepted = this.#rate("vllm:spec_decode_num_accepted_tokens_total");
      words += `; ${figure(drafted)} drafted, ${Math.round((100 * accepted) / drafted)} % of them right`;
      // A row's step that verified some.
      const steps = this.#rate("vllm:spec_decode_num_drafts_total");
      if (steps > 0) words += `: ${(accepted / steps).toFixed(1)} accepted in each step of a row that had some`;
    }
    const head = el("h3", {}, "Tokens per second");
    this.parts.speed.replaceChildren(head, svg("svg", attributes, line), el("p", { className: "muted" }, words));
  }

  /** Growth of a counter since the look before, per second. */
  #rate(name) {
    const { metrics, previous } = this.watch;
    if (previous === null) return null;
    return Math.max(0, metrics.total(name) - previous.total(name)) / (metrics.time - previous.time);
  }

  #drawPhases() {
    const { metrics, previous } = this.watch;
    const name = "slipstream_step_phase_seconds";
    const grown = (kind, phase) =>
      metrics.of(`${name}_${kind}`, "phase", phase) - (previous?.of(`${name}_${kind}`, "phase", phase) ?? 0);
    const steps = grown("count", "device");
    // While nothing runs, the last steps that did stay to be read.
    if (steps > 0) this.#phases = PHASES.map((phase) => [phase, grown("sum", phase) / steps]);
    if (this.#phases === null) return;
    const most = Math.max(...this.#phases.map(([, time]) => time));
    const rows = this.#phases.map(([phase, time]) => {
      const bar = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
      const kind = phase === "device" ? "step-decode" : "step-host";
      bar.append(svg("rect", { class: kind, width: (time / most) * 100, height: 6 }));
      return el("tr", {}, el("th", { scope: "row" }, phase), el("td", {}, bar), el("td", {}, seconds(time)));
    });
    const head = el("h3", {}, "A step, on average");
    this.parts.phases.replaceChildren(head, el("table", {}, el("tbody", {}, rows)));
  }

  #drawSteps() {
    const { steps, access } = this.watch;
    const state = `${access.steps} ${steps.at(-1)?.step_id}`;
    if (state === this.#steps) return;
    this.#steps = state;
    const head = el("h3", {}, "Steps");
    if (access.steps === "open" && steps.length) {
      const key = ["prefill", "decode", "bubble", "host"].map((kind) =>
        el("span", {}, el("i", { className: `mark step-${kind}`, "aria-hidden": "true" }), kind),
      );
      const words = el("p", { className: "muted key" }, `${spanOf(steps)}:`, key);
      this.parts.steps.replaceChildren(head, drawTimeline(steps), words);
      return;
    }
    const words = {
      locked: "The timeline of the steps needs the admin key.",
      absent: "The timeline of the steps needs an admin key, and this server was started without one.",
    }[access.steps];
    const text = words ?? "No step yet.";
    const button = el("button", { type: "button", onclick: this.openKeys }, "Enter the admin key");
    const parts = [head, el("p", { className: "muted" }, text), ...(access.steps === "locked" ? [button] : [])];
    this.parts.steps.replaceChildren(...parts);
  }

  #drawMemory() {
    const memory = this.watch.health?.memory;
    if (!memory || this.parts.memory.childElementCount) return;
    const weights = memory.weights.reduce((sum, part) => sum + part.bytes, 0);
    const parameters = memory.weights.reduce((sum, part) => sum + part.parameters, 0);
    const rows = [
      ["Weights", bytes(weights), `${(parameters / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} M parameters`],
      ["KV memory", bytes(memory.kv.bytes), `${figure(memory.kv.num_blocks * memory.kv.block_size)} tokens`],
      ["Left free", bytes(memory.free), memory.device],
    ];
    const lines = rows.map(([name, size, more]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, size), el("td", { className: "muted" }, more)),
    );
    this.parts.memory.replaceChildren(el("h3", {}, "Memory"), el("table", {}, el("tbody", {}, lines)));
  }

  /** Another server or another key: nothing of the old one stays. */
  reset() {
    this.#steps = "";
    this.#phases = null;
    this.#rates = [];
    for (const part of Object.values(this.parts)) part.replaceChildren();
  }
}
