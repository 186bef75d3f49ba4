// Looks at the server every few seconds: whether it answers, its metrics, and its steps.

import { ApiError } from "./api.js";
import { Metrics } from "./metrics.js";

const STEPS = 256;
const LIVELY = 1000;
const CALM = 5000;

/**
 * After each look `onlook` is called. `reached` is null before the first answer. `access` says of
 * metrics and steps whether they are "open", "locked" (a key is needed), "absent", or not asked yet.
 */
export class Watch {
  #timer = null;
  #looking = false;
  #last = 0;

  constructor(api) {
    this.api = api;
    this.onlook = () => {};
    this.onlost = () => {};
    this.onback = () => {};
    this.lively = false;
    this.reached = null;
    this.health = null;
    this.forget();
    // Nobody looks at a hidden page, so it asks nothing.
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Ask for everything again: there is another key, or another server. */
  forget() {
    Object.assign(this, { metrics: null, previous: null, steps: [], requests: [], now: 0 });
    this.access = { metrics: null, steps: null };
    this.#last = 0;
  }

  /** Look now, unless the page is hidden. */
  wake() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#looking) this.#look();
  }

  async #look() {
    this.#looking = true;
    try {
      await this.#ask();
    } finally {
      this.#looking = false;
      // A server that is away is asked often: people wait for it.
      const pause = this.lively || !this.reached ? LIVELY : CALM;
      if (!document.hidden) this.#timer = setTimeout(() => this.wake(), pause);
    }
    this.onlook();
  }

  async #ask() {
    const was = this.reached;
    try {
      this.health = await this.api.json("health", { also: [503], signal: AbortSignal.timeout(10000) });
      this.reached = true;
    } catch {
      this.reached = false;
      if (was !== false) this.onlost();
      return;
    }
    if (was === false) {
      this.forget();
      this.onback();
    }
    await Promise.all([this.#askMetrics(), this.#askSteps()]);
  }

  async #askMetrics() {
    if (["locked", "absent"].includes(this.access.metrics)) return;
    const text = await this.#try("metrics", async () => {
      const key = this.api.keys.api || this.api.keys.admin;
      return (await this.api.get("metrics", { key })).text();
    });
    if (text === null) return;
    this.previous = this.metrics;
    this.metrics = new Metrics(text);
    this.metrics.time = performance.now() / 1000;
  }

  async #askSteps() {
    if (!this.lively || ["locked", "absent"].includes(this.access.steps)) return;
    const path = `debug/timeline?format=records&steps=${STEPS}&after=${this.#last}`;
    const view = await this.#try("steps", () => this.api.json(path, { key: this.api.keys.admin }));
    if (view === null) return;
    if (view.last_step < this.#last) this.steps = [];
    this.#last = view.last_step;
    this.steps = [...this.steps, ...view.steps].slice(-STEPS);
  }

  async #try(what, ask) {
    try {
      const answer = await ask();
      this.access[what] = "open";
      return answer;
    } catch (error) {
      // An answer that broke off is asked for again at the next look.
      if (!(error instanceof ApiError)) return null;
      if ([401, 403].includes(error.status)) this.access[what] = "locked";
      else if (error.status === 404) this.access[what] = "absent";
      return null;
    }
  }
}
