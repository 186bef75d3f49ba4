// Documents by how well they match a query, and labels of a text.

import { el } from "./elements.js";
import { costOf, given, givenLines } from "./tasks.js";

const MOST = 100;

export const RERANK = {
  name: "rerank",
  label: "Rerank",
  title: "Which documents match a query",
  about: "Every document gets a score; the larger, the better it matches.",
  verb: "Rank",
  fields: [
    { name: "query", label: "Query", rows: 1, hint: "What is looked for", example: "How do dogs feel?" },
    {
      name: "documents",
      label: "Documents, one a line",
      rows: 6,
      hint: "One document at least",
      example: "A happy dog runs over the meadow.\nThe stock market fell.\nPuppies are glad to see people.",
    },
  ],
  async ask(values, send) {
    const query = given(values, "query", "A query");
    const documents = givenLines(values, "documents", 1, MOST);
    const { body, milliseconds } = await send("rerank", { query, documents, return_documents: false });
    const rows = body.results.map(({ index, relevance_score: score }) => [score, documents[index]]);
    return { summary: costOf(body.usage, milliseconds), nodes: [ranked("Documents, the best first", "Document", rows)] };
  },
};

export const CLASSIFY = {
  name: "classify",
  label: "Classify",
  title: "Labels of a text",
  about: "Every label of the model with its probability, the likeliest first.",
  verb: "Classify",
  fields: [{ name: "text", label: "Text", rows: 4, hint: "A text", example: "What a wonderful day!" }],
  async ask(values, send) {
    const text = given(values, "text", "A text");
    // This address has the names of all labels, and no field for a model.
    const { body, milliseconds } = await send("predict", { inputs: text, model: undefined });
    const rows = body.map(({ label, score }) => [score, label]);
    return { summary: costOf(null, milliseconds), nodes: [ranked("Labels, the likeliest first", "Label", rows)] };
  },
};

/** A table of [score, text], with a bar where all scores are shares. */
function ranked(title, what, rows) {
  const areShares = rows.every(([score]) => score >= 0 && score <= 1);
  const bar = (score) => (areShares ? el("meter", { min: 0, max: 1, value: score, "aria-hidden": "true" }) : "");
  const row = ([score, text]) =>
    el("tr", {}, el("td", { className: "score" }, shown(score)), el("td", { className: "bar" }, bar(score)), el("td", {}, text));
  const head = ["Score", "", what].map((name) => (name ? el("th", { scope: "col" }, name) : el("td", {})));
  const parts = [el("caption", {}, title), el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows.map(row))];
  return el("div", { className: "wide" }, el("table", { className: "ranked" }, parts));
}

/** Four digits behind the point, or what is left of a small number. */
function shown(score) {
  const small = score !== 0 && Math.abs(score) < 0.0001;
  return (small ? score.toExponential(2) : score.toFixed(4)).replace("-", "\u2212");
}
