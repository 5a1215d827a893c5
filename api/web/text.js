"use strict";
// Shows Markdown. markdown-it cuts a text into tokens; the page makes an element of each token that it knows, and never
// reads anything as HTML: the header of the page forbids even that (Trusted Types).

const MOST_PARSED = 32_000;         // letters that are parsed at once, and those of the longest block
const MOST_COLOURED = 20_000;       // letters of code
const MOST_MATH = 2_000;            // letters of a formula

const markdown = markdownit({html: false, linkify: true}).disable("image");     // no picture comes from elsewhere
markdown.linkify.set({fuzzyLink: false, fuzzyEmail: false});
markdown.validateLink = url => /^(https?:\/\/|mailto:)/i.test(url);

const LONG_CELL = 40;               // letters, from which on a cell of a table is not made narrow

/** Marks items that begin with [ ] or [x], and long cells. */
function mark({tokens}) {
  tokens.forEach(({type, content, children}, i) => {
    if (type !== "inline") return;
    if (tokens[i - 1].type === "td_open" && content.length > LONG_CELL) tokens[i - 1].attrSet("class", "long");
    const box = tokens[i - 2]?.type === "list_item_open" && content.match(/^\[([ x])\] /i)?.[1];
    if (!box) return;
    tokens[i - 2].attrSet("class", "task");
    children[0].content = children[0].content.replace(/^.../, box === " " ? "☐" : "☑");
  });
}
markdown.core.ruler.push("mark", mark);

// ---- formulas ----------------------------------------------------------------------------------------------

const FENCES = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const fenceAt = (text, at) => FENCES.find(([open]) => text.startsWith(open, at));

/** Whether two single dollars, with `tex` between them, may be those of a formula. Money ("$5 or $6", "6$ each") and
 *  shells ("$HOME/$USER") have dollars, too. Formulas touch letters in few ways: "CO$_2$", "the $n$th". */
function isFormula(before, tex, behind) {
  if (/^\s|\s$/.test(tex) || /^\d/.test(behind)) return false;
  if (/^[\\^_]/.test(tex)) return true;
  const isSuffix = /\w$/.test(tex) && /^(?:st|nd|rd|th|s|D)\b/.test(behind);
  return !/[a-z\d]/i.test(before) && (isSuffix || !/^[a-z]/i.test(behind)) && !isMoney(tex);
}

/** Whether dollars are about money, as in "I have $20, he has 10$" or "pay $5 (5$)": words or half a bracket follow. */
function isMoney(tex) {
  const n = brackets => tex.match(brackets)?.length;
  return /^\d[^\\]*$/.test(tex) && (/\p{L}{2,} \p{L}{2,}/u.test(tex) || n(/[([]/g) !== n(/[)\]]/g));
}

/** A formula within a line. */
function inlineMath(state, silent) {
  const [open, close, display] = fenceAt(state.src, state.pos) ?? [];
  if (!open) return false;
  const from = state.pos + open.length;
  const length = state.src.slice(from, from + MOST_MATH).indexOf(close);
  const tex = state.src.slice(from, from + length), end = from + length + close.length;
  if (length < 1) return false;
  if (open === "$" && !isFormula(state.src[state.pos - 1] ?? "", tex, state.src.slice(end, end + 3))) return false;
  if (!silent) Object.assign(state.push("math", "", 0), {content: tex, meta: {display}});
  state.pos = end;
  return true;
}

/** A formula of whole lines, up to its end, a blank line or, while it is still written, the end of the text. */
function mathLines(state, first, last, silent) {
  const lineAt = line => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
  const [open, close, display] = fenceAt(lineAt(first), 0) ?? [];
  if (!display || state.sCount[first] - state.blkIndent >= 4) return false;
  const lines = [lineAt(first).slice(open.length)];
  let next = first + 1;
  while (!lines.at(-1).includes(close) && next < last && !state.isEmpty(next)) lines.push(lineAt(next++));
  const isWhole = lines.at(-1).includes(close);
  if (isWhole && !lines.at(-1).endsWith(close)) return false;         // words follow: a formula within a line
  if (silent) return true;
  const tex = lines.join("\n").slice(0, isWhole ? -close.length : undefined);
  Object.assign(state.push("math", "", 0), {content: tex, map: [first, next], meta: {display, isOpen: !isWhole}});
  state.line = next;
  return true;
}

markdown.inline.ruler.before("escape", "math", inlineMath);
markdown.block.ruler.before("fence", "math", mathLines, {alt: ["paragraph", "blockquote", "list"]});

function mathNode({content, meta: {display, isOpen}}) {
  const box = el(display ? "div" : "span", {class: "math", tabindex: display && 0});
  try {
    if (isOpen || content.length > MOST_MATH) throw new RangeError("nothing to draw");
    temml.render(content, box, {displayMode: display, throwOnError: true, maxSize: [20, 20]});
  } catch {                 // the formula as it was written
    box.replaceChildren(el("code", null, content));
  }
  return box;
}

// ---- code --------------------------------------------------------------------------------------------------

/** Letters of code in elements of class hl-KIND. A tree's children are strings and trees. */
function coloured(tree) {
  const kind = tree.scope?.split(".")[0];
  const nodes = tree.children.map(child => typeof child === "string" ? child : coloured(child));
  return el("span", kind && {class: `hl-${kind}`}, ...nodes);
}

/** Code in its colours, or as it is where colouring would lose some of it. */
function colouredCode(code, language) {
  const shown = coloured(hljs.highlight(code, {language, ignoreIllegals: true})._emitter.root);
  return shown.textContent === code ? shown : code;
}

function codeNode({content, info}) {
  const language = info.trim().split(/\s/)[0].toLowerCase(), code = content.replace(/\n$/, "");
  const isKnown = hljs.getLanguage(language) && code.length <= MOST_COLOURED;
  const shown = isKnown ? colouredCode(code, language) : code;
  return el("figure", {class: "code"},
    el("figcaption", null, el("span", null, language.slice(0, 30)), copyButton(() => code)),
    el("pre", {tabindex: 0}, el("code", null, shown)));
}

// ---- tokens to elements ------------------------------------------------------------------------------------

const NODES = {
  text: token => document.createTextNode(token.content),
  text_special: token => document.createTextNode(token.content),
  softbreak: () => el("br"), hardbreak: () => el("br"), hr: () => el("hr"),
  code_inline: token => el("code", null, token.content), math: mathNode, fence: codeNode, code_block: codeNode,
  heading_open: token => el(`h${Math.min(6, Number(token.tag[1]) + 2)}`),         // the page's own title is above
  ordered_list_open: token => el("ol", {start: token.attrGet("start")}),
  link_open: token => el("a", {href: token.attrGet("href"), target: "_blank", rel: "noopener noreferrer"}),
  list_item_open: token => el("li", {class: token.attrGet("class")}), th_open: cellNode, td_open: cellNode,
};
for (const tag of ["p", "ul", "blockquote", "table", "thead", "tbody", "tr", "strong", "em", "s"]) {
  const type = {p: "paragraph", ul: "bullet_list"}[tag] ?? tag;
  NODES[`${type}_open`] = () => el(tag);
}

function cellNode(token) {
  const cell = el(token.tag, {class: token.attrGet("class")});
  cell.style.textAlign = token.attrGet("style")?.match(/left|right|center/)?.[0] ?? "";
  return cell;
}

function build(tokens, box) {
  const open = [box];
  for (const token of tokens) {
    if (token.type === "inline") build(token.children, open.at(-1));
    else if (token.hidden) continue;
    else if (token.nesting < 0) open.pop();
    else {
      const node = NODES[token.type](token);
      open.at(-1).append(token.tag === "table" ? el("div", {class: "table", tabindex: 0}, node) : node);
      if (token.nesting > 0) open.push(node);
    }
  }
}

// ---- a text that grows -------------------------------------------------------------------------------------

/** Blocks of a text: {source, tokens, start (its first line), at (letters before it)}. */
function blocks(text, links) {
  const lines = text.split("\n"), ends = [0], found = [];
  for (const line of lines) ends.push(ends.at(-1) + line.length + 1);
  for (const token of markdown.parse(text, links)) {
    if (!token.level && token.nesting >= 0) {
      const [start, end] = token.map;
      found.push({source: lines.slice(start, end).join("\n"), tokens: [], start, at: ends[start]});
    }
    found.at(-1).tokens.push(token);
  }
  return found;
}

/** Shows `text`, which only grows until isWhole, in `box`. A growing text is parsed from its last blocks on. Elements
 *  that are there already stay, so that selecting text works while more arrives. */
function showText(box, text, isWhole) {
  text = text.replace(/\r\n?/g, "\n");
  if (isWhole || !box.progress) box.progress = {at: 0, n: 0, links: {}, fence: ""};
  const now = box.progress;
  box.sources ??= [];
  while (true) {
    const room = MOST_PARSED - now.fence.length, isCut = text.length - now.at > room;
    const piece = now.fence + text.slice(now.at, now.at + room), found = blocks(piece, now.links);
    place(box, now, found);
    if (!isCut) return settle(now, found, piece);
    const last = found.at(-1), isAlone = found.length < 2;
    now.n += isAlone ? found.length : found.length - 1;
    now.at += (isAlone ? piece.length : last.at) - now.fence.length;    // a block that is too long goes on as a new one
    now.fence = isAlone ? fenceOf(last) : "";
  }
}

/** The line that a block of code begins with, for the code that goes on behind it; "" for other blocks. */
function fenceOf(block) {
  const {type, markup, info} = block?.tokens[0] ?? {};
  return type === "fence" && markup.length + info.length < 100 ? `${markup}${info}\n` : "";
}

/** Puts blocks into the box, behind the first now.n. */
function place(box, now, found) {
  const known = Object.keys(now.links.references ?? {}).length;
  const sources = found.map(({source}) => source.includes("[") ? `${source}\n${known}` : source);
  const same = sources.findIndex((source, i) => source !== box.sources[now.n + i]);
  const first = same < 0 ? found.length : same;
  while (box.children.length > now.n + first) box.lastChild.remove();
  const fresh = document.createDocumentFragment();
  found.slice(first).forEach(({tokens}) => build(tokens, fresh));
  box.append(fresh);
  box.sources.splice(now.n + first, Infinity, ...sources.slice(first));
}

/** Blocks that begin in the last two lines may still become part of those before: "# a" may become "#all". */
function settle(now, found, piece) {
  const n_lines = piece.split("\n").length;
  const sure = found.findLastIndex(({start}) => start < n_lines - 2);
  if (sure < 1) return;
  now.at += found[sure].at - now.fence.length;
  now.n += sure;
  now.fence = "";
}
