// A conversation: what was said and which responses answer it.
import { $, ask, copy, keyed, make, url } from "./http.js";
import { answerTo, follow, running } from "./following.js";
import * as kept from "./kept.js";
import * as pictures from "./pictures.js";
import * as shared from "./shared.js";
import { write } from "./words.js";

const fields = $("settings").querySelector("form").elements;
let { settings = {}, model = "", share = false } = kept.ways();
let name = kept.open();
let turns = kept.turnsOf(name);
let conversation = kept.conversationOf(name); // its id, if the gateway keeps it for the tenant
let editing = null; // the turn that the message takes the place of
let models = [];
let following = null; // the AbortController of the answer that runs

function keep() {
  const shown = turns.map(({ answer, element, meta, ...turn }) => {
    const { id, body, status, resumed, gap, usage, error, took } = answer;
    const parts = running(answer) ? [] : answer.parts; // what still comes is read again
    return { ...turn, answer: { id, body: pictures.without(body), status, resumed, gap, usage, error, took, parts } };
  });
  const fits = kept.keep(name, shown, conversation) && kept.keepWays({ settings, model, share });
  $("full").hidden = fits;
}

// ---------------------------------------------------------------- asking

function bodyOf(input) {
  const { effort, tools, ...sampling } = settings;
  const before = !conversation && turns.findLast(({ answer }) => answer.id && answer.status !== "failed")?.answer.id;
  const lost = !conversation && !before && turns.some(({ answer }) => answer.status === "completed");
  return {
    model, input: lost ? [...told(turns), ...items(input)] : input, stream: true, background: true, ...sampling,
    ...(conversation && { conversation }),
    ...(tools && { tools: JSON.parse(tools) }),
    ...(effort && { reasoning: { effort } }),
    ...(before && { previous_response_id: before }),
  };
}

const items = (input) => (typeof input === "string" ? [{ role: "user", content: input }] : input);

/** What was said and answered before, for a gateway that no longer knows it. Pictures are lost. */
function told(before) {
  return before.flatMap(({ said, asked, answer }) => [
    ...(asked ?? (said ? [{ role: "user", content: said }] : [])),
    ...answer.parts.flatMap((part) => {
      if (part.kind === "text") return part.text ? [{ role: "assistant", content: part.text }] : [];
      if (part.kind !== "call" || part.output === undefined) return [];
      const call = { call_id: part.call_id, name: part.name, ...(part.namespace && { namespace: part.namespace }) };
      return part.type === "custom_tool_call"
        ? [{ type: part.type, ...call, input: part.text }, { type: "custom_tool_call_output", call_id: part.call_id, output: part.output }]
        : [{ type: "function_call", ...call, arguments: part.text }, { type: "function_call_output", call_id: part.call_id, output: part.output }];
    }),
  ]);
}

/** The request once more with the whole conversation in place of its predecessor, which was deleted or has expired. */
function whole(turn) {
  const { previous_response_id: _, conversation: __, input, ...rest } = turn.answer.body;
  const outputs = Array.isArray(input) && input.every(({ type }) => type?.endsWith("_call_output"));
  return { ...rest, input: [...told(turns.slice(0, turns.indexOf(turn))), ...(outputs ? [] : items(input))] };
}

function say(turn, input) {
  turn.begins = share && !turns.length;
  turn.answer = answerTo(bodyOf(input));
  turns.push(turn);
  keep();
  draw();
  run(turn);
}

async function run(turn) {
  const { answer } = turn;
  following = new AbortController();
  const { signal } = following;
  buttons();
  if (turn.begins) {
    conversation = await shared.begin(kept.titleOf(turns));
    if (conversation) answer.body.conversation = conversation;
  }
  delete turn.begins;
  let frame = 0;
  const ticking = setInterval(() => { if (answer.first) drawMeta(turn); }, 1000);
  await follow(answer, () => {
    if (answer.id !== turn.known) {
      turn.known = answer.id;
      keep();
    }
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      drawAnswer(turn);
    });
  }, signal);
  clearInterval(ticking);
  if (signal.aborted) return;
  const { previous_response_id: before, conversation: at } = answer.body;
  if ((before && answer.code === "previous_response_not_found") || (at && answer.code === "not_found")) {
    conversation = null;
    turn.answer = answerTo(whole(turn));
    return run(turn);
  }
  following = null;
  drawAnswer(turn);
  keep();
  buttons();
  $("spoken").textContent = answer.error ?? textOf(answer) ?? "The answer has ended.";
}

const textOf = (answer) => answer.parts.filter((part) => part.kind === "text").map((part) => part.text).join("\n");

async function stop() {
  const answer = turns.at(-1)?.answer;
  if (!answer || !running(answer)) return;
  answer.waiting = "Stopping …";
  drawMeta(turns.at(-1));
  if (answer.id) await ask(`v1/responses/${answer.id}/cancel`, { method: "POST" }).catch(() => {});
}

function again(turn) {
  turns = turns.slice(0, turns.indexOf(turn));
  const shares = conversation;
  conversation = null; // what the tenant has of it stays as it is
  turn.answer = answerTo(shares ? bodyOf(turn.answer.body.input) : turn.answer.body);
  delete turn.known;
  turns.push(turn);
  draw();
  run(turn);
}

// ---------------------------------------------------------------- shown

function draw() {
  const talk = $("talk");
  $("welcome").hidden = turns.length > 0;
  talk.querySelectorAll("article").forEach((old) => old.remove());
  for (const turn of turns) {
    if (turn.said !== undefined) {
      const thumbs = (turn.pictures ?? []).map((src) => make("img", { src, alt: "A picture that you have sent" }));
      talk.append(make("article", { className: "said", ariaLabel: "You" },
        thumbs.length ? make("div", { className: "thumbs" }, ...thumbs) : null,
        turn.files?.length ? make("p", { className: "note" }, turn.files.join(", ")) : null,
        turn.said ? make("div", { className: "bubble" }, turn.said) : null,
        turn.said ? editButton(turn) : null));
    }
    turn.element = make("article", { className: "answer", ariaLabel: "Answer" });
    turn.meta = make("div", { className: "meta" });
    turn.element.append(turn.meta);
    talk.append(turn.element);
    drawAnswer(turn);
  }
  talk.scrollTop = talk.scrollHeight;
}

function editButton(turn) {
  const button = make("button", { type: "button", className: "quiet small edit" }, "Edit");
  button.addEventListener("click", () => edit(turn));
  return button;
}

/** Say it in another way: what follows it is forgotten when it is sent. */
function edit(turn) {
  editing = turn;
  $("editing").hidden = !turn;
  if (turn) {
    $("said").value = turn.said;
    $("said").focus();
  }
  buttons();
}

function drawAnswer(turn) {
  const talk = $("talk"), { answer, element } = turn;
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
  element.classList.toggle("running", running(answer));
  element.ariaBusy = String(running(answer));
  const wanted = answer.parts.length || !running(answer) ? answer.parts : [{ kind: "text", text: "" }];
  wanted.forEach((part, place) => {
    let shown = element.children[place];
    if (shown === turn.meta || shown.dataset.kind !== part.kind) {
      const made = parts[part.kind].make(part, turn);
      made.dataset.kind = part.kind;
      if (shown === turn.meta) turn.meta.before(made);
      else shown.replaceWith(made);
      shown = made;
    }
    parts[part.kind].write(shown, part, turn);
  });
  while (element.children[wanted.length] !== turn.meta) element.children[wanted.length].remove();
  drawMeta(turn);
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

const parts = {
  text: {
    make: () => make("div", { className: "words" }),
    write: (shown, part) => write(shown, part.text),
  },
  thought: {
    make: () => make("details", { className: "thought" }, make("summary"), make("div")),
    write(shown, part, { answer }) {
      const thinks = running(answer) && answer.parts.at(-1) === part;
      shown.firstChild.textContent = thinks ? "Thinking …" : "Thought";
      shown.lastChild.textContent = part.text;
    },
  },
  call: {
    make: (part) => make("div", { className: "call" },
      make("span", { className: "name" }, [part.namespace, part.name].filter(Boolean).join(".")),
      make("pre", { tabIndex: 0 })),
    write(shown, part, turn) {
      shown.children[1].textContent = tidy(part.text);
      const answered = part.output !== undefined;
      const waits = !answered && turn === turns.at(-1) && !running(turn.answer) && turn.answer.status === "completed";
      if (waits && !shown.querySelector("form")) shown.append(resultForm(part, turn));
      if (!waits) shown.querySelector("form")?.remove();
      if (answered && !shown.querySelector(".note")) shown.append(make("p", { className: "note" }, `Result: ${part.output}`));
    },
  },
};

function tidy(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Where the person gives what a tool would answer. It is sent when all calls of the turn have theirs. */
function resultForm(part, turn) {
  const field = make("input", { ariaLabel: `Result of ${part.name}`, placeholder: "Its result", required: true });
  const form = make("form", {}, field, make("button", { className: "plain" }, "Send"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    part.output = field.value;
    const calls = turn.answer.parts.filter(({ kind }) => kind === "call");
    drawAnswer(turn);
    if (calls.some(({ output }) => output === undefined)) return;
    say({}, calls.map(({ type, call_id, output }) => ({ type: `${type ?? "function_call"}_output`, call_id, output })));
  });
  return form;
}

function drawMeta(turn) {
  const { answer } = turn;
  const small = (label, act) => {
    const button = make("button", { type: "button", className: "quiet small" }, label);
    button.addEventListener("click", act);
    return button;
  };
  const seconds = (s) => `${s.toFixed(1)} s`;
  const silent = answer.lastDrawn === answer.seen ? (answer.silent ?? 0) + 1 : 0;
  Object.assign(answer, { lastDrawn: answer.seen, silent });
  const now = [];
  if (running(answer)) {
    if (answer.waiting) now.push(make("span", { className: "waits" }, answer.waiting));
    else if (answer.status === "queued" && answer.id) now.push(make("span", {}, "Waiting for a worker"));
    else if (silent > 2) now.push(make("span", { className: "waits" }, "Silent. If the worker has died, another one goes on."));
  } else {
    const { usage, took } = answer;
    const facts = [
      { cancelled: "stopped", incomplete: "cut at the most tokens" }[answer.status],
      usage && `${usage.output_tokens} tokens`,
      usage && took > 200 && !answer.resumed && `${Math.round(usage.output_tokens / (took / 1000))} tokens/s`,
      usage?.input_tokens_details.cached_tokens && `${usage.input_tokens_details.cached_tokens} of ${usage.input_tokens} cached`,
    ].filter(Boolean);
    if (answer.error) now.push(make("span", { className: "wrong", role: "alert" }, answer.error));
    if (facts.length) now.push(make("span", { className: "facts" }, facts.join(" · ")));
  }
  if (answer.resumed) now.push(make("span", { className: "kept" }, "resumed, nothing lost"));
  else if (answer.gap) now.push(make("span", { className: "kept" }, `went on after ${seconds(answer.gap)}`));
  if (!running(answer)) {
    if (textOf(answer)) now.push(small("Copy", (event) => copy(textOf(answer), event.currentTarget)));
    if (answer.id || answer.error) now.push(small("As curl", () => showCurl(answer)));
    if (turn === turns.at(-1) && pictures.complete(answer.body)) now.push(small("Again", () => again(turn)));
  } else if (answer.id) now.push(small("As curl", () => showCurl(answer)));
  const mark = now.map((one) => one.textContent).join("|");
  if (turn.meta.mark === mark) return;
  turn.meta.mark = mark;
  turn.meta.replaceChildren(...now);
}

function showCurl(answer) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = keyed() ? ` \\\n  -H "Authorization: Bearer $PETIOLE_KEY"` : "";
  const body = JSON.stringify(pictures.without(answer.body), null, 2);
  $("curl-ask").textContent = `curl -N ${url("v1/responses")} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(body)}`;
  $("curl-again").textContent = `curl -N ${quoted(`${url("v1/responses")}/${answer.id}?stream=true&starting_after=0`)}${key}`;
  $("curl").showModal();
}

$("curl-copy").addEventListener("click", () => copy($("curl-ask").textContent, $("curl-copy")));

// ---------------------------------------------------------------- the message, and what it is sent with

function buttons() {
  const runs = following !== null;
  $("stop").hidden = !runs;
  $("send").hidden = runs;
  $("send").disabled = !model || !($("said").value.trim() || pictures.chosen.length);
}

function send() {
  const said = $("said").value.trim();
  if (following || $("send").disabled) return;
  const chosen = pictures.taken();
  const content = [...pictures.partsOf(chosen), ...(said ? [{ type: "input_text", text: said }] : [])];
  $("said").value = "";
  if (editing) {
    turns = turns.slice(0, turns.indexOf(editing));
    conversation = null;
  }
  edit(null);
  const asked = chosen.some(({ text }) => text) ? [{ role: "user", content: content.filter(({ type }) => type === "input_text") }] : undefined;
  const turn = { said, pictures: chosen.flatMap(({ thumb }) => thumb ?? []), files: chosen.flatMap(({ name }) => name ?? []), asked };
  say(turn, chosen.length ? [{ role: "user", content }] : said);
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", stop);
$("said").addEventListener("input", buttons);
$("said").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (editing) {
      $("said").value = "";
      edit(null);
    } else stop();
  }
  if (event.key === "/" && !event.target.closest("input, textarea, select, dialog") && !$("chat").hidden) {
    event.preventDefault();
    $("said").focus();
  }
});
/** Show another conversation. The answer that runs goes on, and is read on when its conversation is shown. */
function change(other) {
  following?.abort();
  following = null;
  edit(null);
  name = kept.open(other);
  turns = kept.turnsOf(name);
  conversation = kept.conversationOf(name);
  draw();
  buttons();
  readOn();
  $("said").focus();
  if (conversation) catchUp();
}

/** Show what others of the tenant have said in this conversation meanwhile. */
async function catchUp() {
  const of = name, said = following ? [] : await shared.turnsOf(conversation, model);
  if (of !== name || following || said.length <= turns.length) return;
  turns = said;
  keep();
  draw();
}

/** Show a conversation of the tenant. */
function changeToShared({ id }) {
  const here = kept.list().find((one) => one.conversation === id);
  if (here) return change(here.name);
  change(id);
  conversation = id;
  catchUp();
}

$("fresh").addEventListener("click", () => {
  stop();
  change(kept.fresh());
});

function drawPast() {
  const all = kept.list();
  $("past-none").hidden = all.length > 0;
  $("past-list").replaceChildren(...all.map((one) => {
    const open = make("button", { type: "button", className: "quiet grow" }, one.title || "A conversation",
      make("span", { className: "note" }, new Date(one.at).toLocaleString()));
    if (one.name === name) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => { $("past").close(); change(one.name); });
    const drop = make("button", { type: "button", className: "quiet small", ariaLabel: `Forget ${one.title}` }, "Forget");
    drop.addEventListener("click", () => {
      kept.remove(one.name);
      if (one.name === name) change(kept.fresh());
      drawPast();
    });
    return make("li", { className: "row" }, open, drop);
  }));
}

async function drawShared() {
  const all = await shared.list();
  $("past-tenant").hidden = !all;
  $("share").checked = share;
  $("past-shared").replaceChildren(...(all ?? []).map((one) => {
    const title = one.metadata.title || "A conversation";
    const open = make("button", { type: "button", className: "quiet grow" }, title);
    open.addEventListener("click", () => { $("past").close(); changeToShared(one); });
    const drop = make("button", { type: "button", className: "quiet small", ariaLabel: `Delete ${title} for all` }, "Delete");
    drop.addEventListener("click", async () => { await shared.remove(one.id); drawShared(); });
    return make("li", { className: "row" }, open, drop);
  }));
}

$("share").addEventListener("change", () => {
  share = $("share").checked;
  keep();
});
$("talks").addEventListener("click", () => { drawPast(); drawShared(); $("past").showModal(); });
$("edit-leave").addEventListener("click", () => { $("said").value = ""; edit(null); });
pictures.ready(buttons);

$("model").addEventListener("change", () => {
  model = $("model").value;
  keep();
  fit();
});

function fit() {
  const { images } = models.find(({ id }) => id === model)?.capabilities ?? {};
  pictures.allow(Boolean(images));
  buttons();
}

async function listModels() {
  const answer = await ask("v1/models").then((one) => one.json()).catch(() => null);
  models = (answer?.data ?? []).filter(({ capabilities }) => capabilities.chat).sort((a, b) => b.live - a.live);
  if (!models.some(({ id }) => id === model)) model = models[0]?.id ?? "";
  $("model").replaceChildren(...(models.length
    ? models.map(({ id, live }) => make("option", { value: id, selected: id === model }, live ? id : `${id} (no worker now)`))
    : [make("option", { value: "" }, answer ? "No model yet" : "The gateway does not answer")]));
  fit();
  if (!models.length) setTimeout(listModels, 2000);
}

// ---------------------------------------------------------------- settings

$("tune").addEventListener("click", () => {
  for (const field of fields) if (field.name) field.value = settings[field.name] ?? "";
  complain("");
  $("settings").showModal();
});

function complain(message) {
  $("settings-error").hidden = !message;
  $("settings-error").textContent = message;
}

$("reset").addEventListener("click", () => { for (const field of fields) if (field.name) field.value = ""; });

$("settings").querySelector("form").addEventListener("submit", (event) => {
  const wanted = {};
  for (const { name, value, type } of fields) if (name && value.trim()) wanted[name] = type === "number" ? Number(value) : value.trim();
  try {
    if (wanted.tools && !Array.isArray(JSON.parse(wanted.tools))) throw new Error();
  } catch {
    event.preventDefault();
    complain("Tools must be a list, as JSON.");
    return;
  }
  settings = wanted;
  keep();
});

// ---------------------------------------------------------------- begin

export function shown(now) {
  if (now) $("said").focus({ preventScroll: true });
}

function readOn() {
  const last = turns.at(-1);
  if (!last || !running(last.answer)) return;
  last.answer.resumed += 1; // the page was reloaded in mid-answer
  if (last.answer.id) run(last);
  else Object.assign(last.answer, { status: "failed", error: "It was not sent." }) && drawAnswer(last);
}

draw();
listModels();
readOn();
