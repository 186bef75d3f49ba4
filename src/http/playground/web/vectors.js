// Vectors of texts: one of them, and how near several are to each other.

import { copyButton, el } from "./elements.js";
import { costOf, given, givenLines } from "./tasks.js";

const SHOWN = 12;
const MOST = 32;

const digits = (number, count = 4) => number.toFixed(count).replace("-", "\u2212");

export const EMBED = {
  name: "embed",
  label: "Embed",
  title: "A text as a vector",
  about: "Texts that mean the same have vectors that point the same way.",
  verb: "Embed",
  fields: [{ name: "text", label: "Text", rows: 4, hint: "A text", example: "A happy dog runs over the meadow." }],
  async ask(values, send) {
    const text = given(values, "text", "A text");
    const { body, milliseconds } = await send("v1/embeddings", { input: text, encoding_format: "float" });
    const vector = body.data[0].embedding;
    const length = Math.hypot(...vector);
    const facts = [
      ["Numbers", vector.length.toLocaleString("en")],
      ["Length", digits(length)],
      ["Smallest", digits(Math.min(...vector))],
      ["Largest", digits(Math.max(...vector))],
    ];
    const list = el("dl", { className: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    const more = vector.length > SHOWN ? ` and ${(vector.length - SHOWN).toLocaleString("en")} more` : "";
    const numbers = vector.slice(0, SHOWN).map((number) => digits(number)).join("  ");
    const copy = copyButton(() => JSON.stringify(vector), "Copy all as JSON");
    const head = el("div", { className: "code-head" }, el("span", {}, `The first ${Math.min(SHOWN, vector.length)}${more}`), copy);
    const code = el("div", { className: "code" }, head, el("pre", { className: "numbers-text" }, numbers));
    return { summary: costOf(body.usage, milliseconds), nodes: [list, code] };
  },
};

export const COMPARE = {
  name: "compare",
  label: "Compare",
  title: "How near texts are to each other",
  about: "The cosine of each two vectors: 1 is the same direction, 0 is nothing in common.",
  verb: "Compare",
  fields: [
    {
      name: "texts",
      label: "Texts, one a line",
      rows: 6,
      hint: "Two texts at least",
      example: "A happy dog.\nA glad puppy.\nA sad cat.\nThe stock market fell.",
    },
  ],
  async ask(values, send) {
    const texts = givenLines(values, "texts", 2, MOST);
    const { body, milliseconds } = await send("v1/embeddings", { input: texts, encoding_format: "float" });
    const cosines = cosinesOf(body.data.map(({ embedding }) => embedding));
    return { summary: costOf(body.usage, milliseconds), nodes: [matrix(texts, cosines)] };
  },
};

/** The cosine of each two vectors. */
export function cosinesOf(vectors) {
  const lengths = vectors.map((vector) => Math.hypot(...vector));
  const product = (a, b) => a.reduce((sum, number, i) => sum + number * b[i], 0);
  return vectors.map((a, i) => vectors.map((b, j) => product(a, b) / (lengths[i] * lengths[j])));
}

function matrix(texts, cosines) {
  const head = el("tr", {}, el("td", {}), texts.map((text, i) => el("th", { scope: "col", title: text }, String(i + 1))));
  const row = (text, i) => {
    const name = el("th", { scope: "row", title: text }, el("span", {}, `${i + 1}  ${text}`));
    const cell = (cosine) => el("td", { className: `heat${heatOf(cosine)}` }, digits(cosine, 2));
    return el("tr", {}, name, cosines[i].map(cell));
  };
  const caption = el("caption", {}, "Cosines of each two texts");
  return el("div", { className: "wide" }, el("table", { className: "matrix" }, caption, el("thead", {}, head), el("tbody", {}, texts.map(row))));
}

/** From 0, nothing in common, to 5, the same. */
const heatOf = (cosine) => Math.min(5, Math.max(0, Math.floor(cosine * 5 + 1e-6)));
