// Text of a model as elements: the part of Markdown that models write. No HTML is ever read.
import { copy, make } from "./http.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^)\s]+)\)/g;

function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(at, found.index));
    const [whole, code, strong, slanted, label, href] = found;
    if (code !== undefined) parts.push(make("code", {}, code));
    else if (strong !== undefined) parts.push(make("strong", {}, strong));
    else if (slanted !== undefined) parts.push(make("em", {}, slanted));
    else parts.push(make("a", { href, rel: "noopener noreferrer", target: "_blank" }, label));
    at = found.index + whole.length;
  }
  return [...parts, text.slice(at)].filter((part) => part !== "");
}

const ITEM = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/;
const RULE = /^\s{0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const BETWEEN = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8; // lists in lists

/** Blocks of text, each with its kind: code, list, table, rule, heading, quote or paragraph. */
function blocks(text) {
  const found = [], lines = text.split("\n");
  let open = null;
  const add = (kind, line) => {
    if (open?.kind !== kind) found.push((open = { kind, lines: [] }));
    open.lines.push(line);
  };
  lines.forEach((line, place) => {
    if (open?.kind === "code") {
      if (/^\s*(`{3,}|~{3,})\s*$/.test(line) && line.trim().startsWith(open.fence)) open = null;
      else open.lines.push(line.startsWith(open.indent) ? line.slice(open.indent.length) : line);
    } else if (/^\s*(```|~~~)/.test(line)) {
      const [, indent, fence, language] = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
      found.push((open = { kind: "code", lines: [], language, indent, fence }));
    } else if (!line.trim()) {
      if (open?.kind !== "list" || !ITEM.test(lines[place + 1] ?? "")) open = null; // a list may be wide
    } else if (RULE.test(line)) {
      open = null;
      add("rule", "");
      open = null;
    } else if (/^#{1,6}\s/.test(line)) {
      open = null;
      add("heading", line);
      open = null;
    } else if (ITEM.test(line)) {
      add("list", line);
    } else if (open?.kind === "list" && /^\s{2,}/.test(line)) {
      open.lines.push(line); // an item goes on
    } else if (open?.kind === "table" && line.includes("|")) {
      open.lines.push(line);
    } else if (line.includes("|") && BETWEEN.test(lines[place + 1] ?? "") && (lines[place + 1] ?? "").includes("|")) {
      open = null;
      add("table", line);
    } else if (/^>\s?/.test(line)) {
      add("quote", line.replace(/^>\s?/, ""));
    } else {
      add("paragraph", line);
    }
  });
  return found;
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table([head, between, ...rows]) {
  const sides = cells(between ?? "").map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (name, line) => make("tr", {}, ...cells(line).map((cell, place) => make(name, { className: sides[place] ?? "" }, ...inline(cell))));
  return make("div", { className: "scroll", tabIndex: 0 },
    make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((line) => row("td", line)))));
}

/** A list, with those that are indented within its items. */
function listed(lines) {
  const root = make("div"), open = [{ indent: -1, item: root, list: null }];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      open.at(-1).item.append("\n", ...inline(line.trim()));
      continue;
    }
    const [, { length: indent }, number, said] = found;
    while (open.length > 1 && open.at(-1).indent > indent) open.pop();
    if (open.at(-1).indent < indent && open.length <= DEEPEST) open.push({ indent, item: null, list: null });
    const here = open.at(-1), kind = number === undefined ? "UL" : "OL";
    if (here.list?.tagName !== kind) {
      here.list = make(kind.toLowerCase(), kind === "OL" ? { start: Number(number) } : {});
      open.at(-2).item.append(here.list);
    }
    here.list.append((here.item = make("li", {}, ...inline(said))));
  }
  return root.children.length === 1 ? root.firstChild : root;
}

function code(lines, language) {
  const button = make("button", { type: "button", className: "quiet small" }, "Copy");
  button.addEventListener("click", () => copy(lines.join("\n"), button));
  return make("div", { className: "code" },
    make("div", { className: "row" }, make("span", { className: "note grow" }, language || "code"), button),
    make("pre", { tabIndex: 0 }, make("code", {}, lines.join("\n"))));
}

function element({ kind, lines, language }) {
  switch (kind) {
    case "code": return code(lines, language);
    case "rule": return make("hr");
    case "heading": return make(`h${Math.min(4, 1 + /^#+/.exec(lines[0])[0].length)}`, {}, ...inline(lines[0].replace(/^#+\s+/, "")));
    case "quote": return make("blockquote", {}, ...inline(lines.join("\n")));
    case "table": return table(lines);
    case "list": return listed(lines);
    default: return make("p", {}, ...inline(lines.join("\n")));
  }
}

/** Shows a text. Blocks that are as they were keep their elements, so a selection in them survives. */
export function write(where, text) {
  const wanted = blocks(text);
  wanted.forEach((block, place) => {
    const mark = `${block.kind}\0${block.language ?? ""}\0${block.lines.join("\n")}`;
    const old = where.children[place];
    if (old?.mark === mark) return;
    const made = Object.assign(element(block), { mark });
    if (old) old.replaceWith(made);
    else where.append(made);
  });
  while (where.children.length > wanted.length) where.lastElementChild.remove();
}
