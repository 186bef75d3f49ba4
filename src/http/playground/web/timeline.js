// The last steps as a drawing: what the host did, what the device did, and where the device waited.

import { seconds, svg } from "./elements.js";

const WIDTH = 300;
const HOST = 14;
const DEVICE = 42;
const HEIGHT = 64;
const SHOWN = 10;

/** An SVG of the newest steps, oldest on the left. */
export function drawTimeline(steps) {
  const shown = steps.slice(-SHOWN);
  const begin = Math.min(...shown.map((step) => step.planned));
  const scale = WIDTH / (Math.max(...shown.map((step) => step.published)) - begin || 1);
  const bar = (kind, from, to, y, height, title) => {
    const x = Math.max(0, (from - begin) * scale);
    const width = Math.max(0.6, (to - begin) * scale - x);
    const attributes = { class: `step-${kind}`, x, y, width, height, rx: 1 };
    return svg("rect", attributes, svg("title", {}, title));
  };
  const bars = shown.flatMap((step) => {
    const work = step.prefill_tokens ? "prefill" : "decode";
    const took = seconds(step.device_end - step.device_start);
    const rows = `${step.decode_rows} rows decode, ${step.prefill_tokens} prompt tokens`;
    const name = `Step ${step.step_id}`;
    const pieces = [
      bar("host", step.planned, step.launch_ended, HOST, 14, `${name}: plan and launch`),
      bar("host", step.commit_started, step.published, HOST, 14, `${name}: commit and publish`),
      bar(work, step.device_start, step.device_end, DEVICE, 18, `${name}: ${took}, ${rows}`),
    ];
    // A wait that began before the first step that is shown is not part of the drawing.
    if (step !== shown[0] && step.idle_before > 0) {
      const from = step.device_start - step.idle_before;
      const title = `The device waited ${seconds(step.idle_before)}`;
      pieces.push(bar("bubble", from, step.device_start, DEVICE, 18, title));
    }
    return pieces;
  });
  const label = (text, y) => svg("text", { x: 0, y, class: "lane" }, text);
  const attributes = { class: "timeline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" };
  attributes["aria-label"] = `The last ${shown.length} steps of host and device`;
  return svg("svg", attributes, label("host", 10), label("device", 38), ...bars);
}

/** What the drawing spans, in words. */
export function spanOf(steps) {
  const shown = steps.slice(-SHOWN);
  const first = shown[0].planned;
  const span = Math.max(...shown.map((step) => step.published)) - first;
  return `${shown.length} steps in ${seconds(span)}`;
}
