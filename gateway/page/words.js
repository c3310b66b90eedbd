// Text of a model as elements: the little of Markdown that models write. No HTML is ever read.
import { make } from "./http.js";

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

const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;

/** Blocks of text, each with its kind: code, list, heading, quote or paragraph. */
function blocks(text) {
  const found = [];
  let open = null;
  const add = (kind, line) => {
    if (open?.kind !== kind) found.push((open = { kind, lines: [] }));
    open.lines.push(line);
  };
  for (const line of text.split("\n")) {
    if (open?.kind === "code") {
      if (/^\s*```\s*$/.test(line)) open = null;
      else open.lines.push(line);
    } else if (/^\s*```/.test(line)) {
      found.push((open = { kind: "code", lines: [] }));
    } else if (!line.trim()) {
      open = null;
    } else if (/^#{1,6}\s/.test(line)) {
      open = null;
      add("heading", line.replace(/^#+\s+/, ""));
      open = null;
    } else if (ITEM.test(line)) {
      add(ITEM.exec(line)[1] ? "ordered" : "list", line);
    } else if (/^>\s?/.test(line)) {
      add("quote", line.replace(/^>\s?/, ""));
    } else {
      add("paragraph", line);
    }
  }
  return found;
}

function element({ kind, lines }) {
  switch (kind) {
    case "code": return make("pre", { tabIndex: 0 }, make("code", {}, lines.join("\n")));
    case "heading": return make("h2", {}, ...inline(lines[0]));
    case "quote": return make("blockquote", {}, ...inline(lines.join("\n")));
    case "list":
    case "ordered": {
      const start = Number(ITEM.exec(lines[0])[1] ?? 1);
      const items = lines.map((line) => make("li", {}, ...inline(ITEM.exec(line)[2])));
      return kind === "list" ? make("ul", {}, ...items) : make("ol", { start }, ...items);
    }
    default: return make("p", {}, ...inline(lines.join("\n")));
  }
}

/** Shows a text. Blocks that are as they were keep their elements, so a selection in them survives. */
export function write(where, text) {
  const wanted = blocks(text);
  wanted.forEach((block, place) => {
    const mark = `${block.kind}\0${block.lines.join("\n")}`;
    const old = where.children[place];
    if (old?.mark === mark) return;
    const made = Object.assign(element(block), { mark });
    if (old) old.replaceWith(made);
    else where.append(made);
  });
  while (where.children.length > wanted.length) where.lastElementChild.remove();
}
