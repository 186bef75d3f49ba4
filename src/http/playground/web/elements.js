// Makes elements. Text becomes text nodes, so nothing that a model says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `on...` are listeners; names with a hyphen, `for` and `role` are attributes. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "for" || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An SVG element; every property is an attribute. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A button that says for a moment whether it worked. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", className: "quiet", onclick: copy }, label);
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      // Browsers keep the clipboard to pages from HTTPS or this machine.
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = label), 1500);
  }
  return button;
}

/** Seconds in the unit that reads best. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

/** A number with few digits. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

export const percent = (share) => (Number.isFinite(share) ? `${(share * 100).toFixed(1)} %` : "–");

/** Bytes in the unit that reads best. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
