// The site's search: ranks sections by BM25 (Robertson and Zaragoza, 2009), over words without endings, a title's words
// counted more. It takes the place of the worker that zensical brings, whose results must have every word of a
// question: half of users' questions found nothing there. It speaks that worker's protocol:
//
//   {type: 0, data: {items: [{location, level, title, text}]}}     ->  {type: 1}
//   {type: 2, data: {input, page: {size, from}}}                   ->  {type: 3, data: {items: [{id, matches}], ...}}
//
// tests/project/test_questions.py asks it, in Node.
"use strict";

const TITLE = 4, K = 1.2, B = 0.6; // how often a title's words count; BM25's two numbers
const MEMBERS = 4; // the level of members of Python's names, which the tables of the reference have, too
const NAMES = 0.6; // the share that a section about a Python name counts: those are looked up by their whole name
const PAGE = 10;
const STOP = new Set("a an and as at by for from how in is it its my of on or per s that the to what when with".split(" "));
const WORD = /<[^>]*>|&\w+;|[a-z0-9]+/gi;
const HUMP = /[A-Z]?[a-z]{2,}/g; // of WorkerLostError

let sections = []; // of each: its counted words, how many
let holders = new Map(); // by word, how many sections have it
let mean = 1;

const stem = (word) => (word.length > 4 ? word.replace(/(?:ings?|ers?|ed|es|s|ion|e)$/, "") : word);

/** Each word that counts: its stems (of the whole and of its humps) and its place in `text`, without tags. */
function* words(text) {
  for (const { 0: word, index } of text.matchAll(WORD)) {
    if (/^[<&]/.test(word) || STOP.has(word.toLowerCase())) continue;
    const humps = /[a-z][A-Z]/.test(word) ? word.match(HUMP) ?? [] : [];
    yield { stems: [word, ...humps].map((one) => stem(one.toLowerCase())), start: index, end: index + word.length };
  }
}

function count(section) {
  const counts = new Map();
  let total = 0;
  if (section.level < MEMBERS)
    for (const [text, times] of [[section.title, TITLE], [section.text, 1]])
      for (const { stems } of words(text))
        for (const word of stems) {
          counts.set(word, (counts.get(word) ?? 0) + times);
          total += times;
        }
  return { ...section, counts, total };
}

function prepare(items) {
  sections = items.map(count);
  holders = new Map();
  for (const { counts } of sections) for (const word of counts.keys()) holders.set(word, (holders.get(word) ?? 0) + 1);
  mean = sections.reduce((sum, { total }) => sum + total, 0) / sections.length;
}

/** The word that is being typed also stands for those that begin with it. */
function asked(input) {
  const found = new Set([...words(input)].flatMap(({ stems }) => stems));
  const last = /[a-z0-9]+$/i.exec(input)?.[0].toLowerCase();
  if (last?.length > 2 && !holders.has(stem(last)))
    for (const word of holders.keys()) if (word.startsWith(last)) found.add(word);
  return found;
}

function score({ counts, total, location }, wanted) {
  let sum = 0;
  for (const word of wanted) {
    const times = counts.get(word);
    if (!times) continue;
    const rarity = Math.log(1 + (sections.length - holders.get(word) + 0.5) / (holders.get(word) + 0.5));
    sum += (rarity * times * (K + 1)) / (times + K * (1 - B + (B * total) / mean));
  }
  return sum * (/\bapi\/(#|$)/.test(location) ? NAMES : 1);
}

function marked(section, id, wanted) {
  return ["title", "text"].map((field, n) => ({
    id: 2 * id + n,
    field,
    score: 0,
    value: {
      highlight: {
        ranges: [...words(section[field])]
          .filter(({ stems }) => stems.some((word) => wanted.has(word)))
          .map(({ start, end }) => ({ start, end, value: end - start })),
      },
    },
  }));
}

function answer({ input = "", page = {} }) {
  const wanted = asked(input);
  const ranked = sections
    .map((section, id) => ({ id, score: score(section, wanted) }))
    .filter((one) => one.score > 0)
    .sort((one, other) => other.score - one.score || one.id - other.id);
  const { size = PAGE, from = 0 } = page;
  const at = (start) => ({ size, from: start });
  return {
    items: ranked.slice(from, from + size).map(({ id }) => ({ id, matches: marked(sections[id], id, wanted) })),
    query: { select: { documents: { size: sections.length, data: [] }, terms: [] }, values: [] },
    pagination: {
      total: ranked.length,
      prev: from > 0 ? at(Math.max(0, from - size)) : undefined,
      next: from + size < ranked.length ? at(from + size) : undefined,
    },
    aggregations: [{ type: "term", data: { field: "tags", value: [] } }],
  };
}

self.onmessage = ({ data: { type, data } }) => {
  if (type === 0) prepare(data.items);
  self.postMessage(type === 0 ? { type: 1 } : { type: 3, data: answer(data) });
};
