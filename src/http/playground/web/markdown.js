// A small part of Markdown as elements. Everything that is not recognised stays text.

import { copyButton, el } from "./elements.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const HEADING = /^(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
// What may begin something within a line, and what stands between the parentheses of a link.
const MARK = /`+|!?\[|\*\*?|__?|~~|https?:\/\//g;
const TARGET = /\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)/y;
const ADDRESS = /https?:\/\/[^\s<>()]+/y;
// Lists and quotations deeper than this are text. So no answer, however it is made, takes longer than its length says.
const MOST_DEPTH = 16;

/** The text's blocks, each the lines that one element is made of. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  let isList = false;
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
      const isItem = ITEM.test(line);
      if (isItem && !isList) close();
      if (!lines.length) isList = isItem;
      lines.push(line);
    }
  }
  close();
  return found;
}

/** The element of one block, which lies in so many others. */
export function render(block, depth = 0) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(block);
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(withoutEnd(heading[2])));
  if (RULE.test(block)) return el("hr");
  if (depth < MOST_DEPTH && lines.every((line) => /^\s*>/.test(line))) {
    const inner = lines.map((line) => line.replace(/^\s*> ?/, "")).join("\n");
    return el("blockquote", {}, blocks(inner).map((each) => render(each, depth + 1)));
  }
  if (ITEM.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && isUnderHead(lines[1])) return table(lines);
  return el("p", {}, inline(block));
}

/** A heading without the signs that may close it. */
function withoutEnd(text) {
  let end = text.trimEnd().length;
  while (text[end - 1] === "#") end -= 1;
  return text.slice(0, end).trimEnd();
}

function code(lines, [, mark, language]) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const head = el("div", { className: "code-head" }, el("span", {}, language || "text"), copyButton(() => text));
  const body = el("pre", { tabIndex: 0, "aria-label": `Code, ${language || "text"}` }, el("code", {}, text));
  return el("div", { className: "code" }, head, body);
}

/** A list; deeper indentation is a list inside the last item. */
function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const node = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let item = null;
  let inner = [];
  const close = () => {
    if (item === null) return;
    const nested = depth < MOST_DEPTH ? inner.findIndex((line) => ITEM.test(line)) : -1;
    const text = nested === -1 ? inner : inner.slice(0, nested);
    const deeper = nested === -1 ? null : list(inner.slice(nested), depth + 1);
    node.append(el("li", {}, inline([item, ...text].join("\n")), deeper));
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

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const isUnderHead = (line) => cells(line).every((cell) => /^:?-+:?$/.test(cell));

function table(lines) {
  const head = el("tr", {}, cells(lines[0]).map((cell) => el("th", { scope: "col" }, inline(cell))));
  const rows = lines.slice(2).map((line) => el("tr", {}, cells(line).map((cell) => el("td", {}, inline(cell)))));
  const body = el("table", {}, el("thead", {}, head), el("tbody", {}, rows));
  return el("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table" }, body);
}

/** Nodes of a text: one scan, in which no mark looks for its end where another has. */
function inline(text) {
  const nodes = [];
  const place = places(text);
  let end = 0;
  for (const { 0: mark, index } of text.matchAll(MARK)) {
    if (index < end) continue;
    const found = begun(text, mark, index, place);
    if (found === null) continue;
    nodes.push(text.slice(end, index), ...found.nodes);
    end = found.end;
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

/** What a mark begins: its nodes and its end; null if it is text. Code first: nothing inside it is anything else. */
function begun(text, mark, index, place) {
  const inner = index + mark.length;
  // Within it the same mark has no end, so marks are nested no deeper than there are kinds.
  const within = (tag, close, length) => ({
    nodes: [el(tag, {}, inline(text.slice(inner, close)))],
    end: close + length,
  });
  if (mark[0] === "`") {
    const close = place.ofTicks(mark.length, inner);
    return close === Infinity ? null : { nodes: [el("code", {}, text.slice(inner, close))], end: close + mark.length };
  }
  if (mark.endsWith("[")) {
    const close = place.next("]", inner);
    const target = close < place.next("\n", inner) ? place.target(close + 1) : null;
    if (target === null) return null;
    const end = close + 1 + target[0].length;
    return { nodes: [link(target[1], text.slice(inner, close), text.slice(index, end))], end };
  }
  if (mark[0] === "h") {
    ADDRESS.lastIndex = index;
    let end = index + (ADDRESS.exec(text)?.[0].length ?? 0);
    while (end > inner && ".,;:!?'\"".includes(text[end - 1])) end -= 1;
    const whole = text.slice(index, end);
    return end - inner < 2 ? null : { nodes: [link(whole, whole, whole)], end };
  }
  if (!/\S/.test(text[inner] ?? "")) return null;
  if (mark === "~~") {
    const close = place.next(mark, inner + 1);
    return close === Infinity ? null : within("del", close, 2);
  }
  if (mark.length === 2) {
    let close = place.next(mark, inner + 1);
    if (close === Infinity) return null;
    // Of three signs the last two are the end.
    if (text[close + 2] === mark[0]) close += 1;
    return within("strong", close, 2);
  }
  if (/[\w*]/.test(text[index - 1] ?? "")) return null;
  const close = Math.min(place.next("*", inner), place.next("_", inner), place.next("\n", inner));
  const isEnd = text[close] === mark && close > inner && /\S/.test(text[close - 1]);
  return isEnd && !/[\w*]/.test(text[close + 1] ?? "") ? within("em", close, 1) : null;
}

/** Where the next marks are. Places are asked for in rising order, so that none is searched for twice. */
function places(text) {
  const known = new Map();
  const ticks = new Map();
  let tried = { at: -1, target: null };
  return {
    /** The next sign from a place on; an end of strong text stands behind text. */
    next(mark, from) {
      let at = known.get(mark) ?? -1;
      if (at >= from) return at;
      const fits = () => (mark !== "**" && mark !== "__") || /\S/.test(text[at - 1]);
      do at = text.indexOf(mark, Math.max(from, at + 1));
      while (at !== -1 && !fits());
      known.set(mark, at === -1 ? Infinity : at);
      return known.get(mark);
    },
    /** The next run of so many backticks. */
    ofTicks(length, from) {
      if (ticks.size === 0) {
        for (const { 0: run, index } of text.matchAll(/`+/g)) {
          if (!ticks.has(run.length)) ticks.set(run.length, { at: 0, all: [] });
          ticks.get(run.length).all.push(index);
        }
      }
      const runs = ticks.get(length);
      while (runs.all[runs.at] < from) runs.at += 1;
      return runs.all[runs.at] ?? Infinity;
    },
    /** The target of a link in parentheses at a place, or null. */
    target(at) {
      if (tried.at !== at) {
        TARGET.lastIndex = at;
        tried = { at, target: TARGET.exec(text) };
      }
      return tried.target;
    },
  };
}

/** A link to a page or an address; anything else, such as javascript:, stays text. */
function link(target, label, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label || target);
}
