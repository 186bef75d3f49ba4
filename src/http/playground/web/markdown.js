// A small part of Markdown as elements. Everything that is not recognised stays text.

import { copyButton, el } from "./elements.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ROW = /^\s*\|?.*\|.*$/;
const UNDER_HEAD = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Code first: nothing inside it is anything else.
const INLINE =
  /(`+)([^`](?:.*?[^`])?)\1(?!`)|!?\[([^\]\n]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)|(\*\*|__)(?=\S)(.+?\S|\S)\5|(?<![\w*])([*_])(?=\S)([^*_\n]*?\S|\S)\7(?![\w*])|~~(?=\S)(.+?)~~|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/gs;

/** The text's blocks, each the lines that one element is made of. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const close = () => {
    if (lines.length) found.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence !== null) {
      lines.push(line);
      if (mark && mark[1].startsWith(fence) && line.trim() === mark[1]) {
        fence = null;
        close();
      }
    } else if (mark) {
      close();
      fence = mark[1];
      lines.push(line);
    } else if (line.trim() === "") close();
    else if (HEADING.test(line) || RULE.test(line)) {
      close();
      found.push(line);
    } else {
      if (ITEM.test(line) && lines.length && !ITEM.test(lines[0])) close();
      lines.push(line);
    }
  }
  close();
  return found;
}

/** The element of one block. */
export function render(block) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(block);
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2]));
  if (RULE.test(block)) return el("hr");
  if (lines.every((line) => /^\s*>/.test(line))) {
    const inner = lines.map((line) => line.replace(/^\s*> ?/, "")).join("\n");
    return el("blockquote", {}, blocks(inner).map(render));
  }
  if (ITEM.test(lines[0])) return list(lines);
  if (lines.length > 1 && ROW.test(lines[0]) && UNDER_HEAD.test(lines[1])) return table(lines);
  return el("p", {}, inline(block));
}

function code(lines, [, mark, language]) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const head = el("div", { className: "code-head" }, el("span", {}, language || "text"), copyButton(() => text));
  const body = el("pre", { tabIndex: 0, "aria-label": `Code, ${language || "text"}` }, el("code", {}, text));
  return el("div", { className: "code" }, head, body);
}

/** A list; deeper indentation is a list inside the last item. */
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const node = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let item = null;
  let inner = [];
  const close = () => {
    if (item === null) return;
    const nested = inner.findIndex((line) => ITEM.test(line));
    const text = nested === -1 ? inner : inner.slice(0, nested);
    node.append(el("li", {}, inline([item, ...text].join("\n")), nested === -1 ? null : list(inner.slice(nested))));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) {
      close();
      [item, inner] = [found[3], []];
    } else inner.push(line);
  }
  close();
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const head = el("tr", {}, cells(lines[0]).map((cell) => el("th", { scope: "col" }, inline(cell))));
  const rows = lines.slice(2).map((line) => el("tr", {}, cells(line).map((cell) => el("td", {}, inline(cell)))));
  const body = el("table", {}, el("thead", {}, head), el("tbody", {}, rows));
  return el("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table" }, body);
}

/** Nodes of a line of text. */
function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , codeText, label, target, , strong, , emphasis, struck, bare] = found;
    nodes.push(text.slice(end, found.index));
    end = found.index + whole.length;
    if (codeText !== undefined) nodes.push(el("code", {}, codeText));
    else if (label !== undefined) nodes.push(link(target, label, whole));
    else if (strong !== undefined) nodes.push(el("strong", {}, inline(strong)));
    else if (emphasis !== undefined) nodes.push(el("em", {}, inline(emphasis)));
    else if (struck !== undefined) nodes.push(el("del", {}, inline(struck)));
    else nodes.push(link(bare, bare, whole));
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

/** A link to a page or an address; anything else, such as javascript:, stays text. */
function link(target, label, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label || target);
}
