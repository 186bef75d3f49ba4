// Prometheus' text format, as GET /metrics has it.

/** Samples by name; `total` sums over labels, `of` reads one label's value. */
export class Metrics {
  #samples = new Map();

  constructor(text) {
    for (const line of text.split("\n")) {
      if (line === "" || line.startsWith("#") || line.includes("_bucket{")) continue;
      const found = /^([^{\s]+)(\{.*\})?\s+(\S+)/.exec(line);
      if (found === null) continue;
      const samples = this.#samples.get(found[1]) ?? [];
      samples.push({ labels: found[2] ?? "", value: Number(found[3]) });
      this.#samples.set(found[1], samples);
    }
  }

  /** The sum over all labels; NaN where there is no such name. */
  total(name) {
    const samples = this.#samples.get(name);
    return samples ? samples.reduce((sum, sample) => sum + sample.value, 0) : NaN;
  }

  /** The sum over samples with this value of a label. */
  of(name, label, value) {
    const wanted = `${label}="${value}"`;
    const samples = (this.#samples.get(name) ?? []).filter(({ labels }) => labels.includes(wanted));
    return samples.reduce((sum, sample) => sum + sample.value, 0);
  }
}
