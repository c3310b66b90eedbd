// The fleet, as `petiole status` has it, read again every two seconds while somebody looks.
import { $, Refused, ask, make } from "./http.js";
import { meter, nothing, whole } from "./shapes.js";

const EVERY_MS = 2000;
const REMEMBERED = 60; // figures of a worker's rate
const rates = new Map();
let timer = 0;

export function shown(now) {
  clearTimeout(timer);
  timer = 0;
  if (now) look();
}

addEventListener("visibilitychange", () => { if (!document.hidden && !$("fleet").hidden) shown(true); });

async function look() {
  try {
    const [seen, used] = await Promise.all([
      ask("v1/fleet").then((answer) => answer.json()),
      ask("v1/usage?days=1").then((answer) => answer.json()).catch(() => ({ data: [] })),
    ]);
    draw({ ...seen, used: used.data });
    complain("");
  } catch (error) {
    complain(error instanceof Refused ? error.message : "The gateway does not answer. Asking again …");
  }
  clearTimeout(timer);
  if (!$("fleet").hidden && !document.hidden) timer = setTimeout(look, EVERY_MS);
}

function complain(message) {
  $("fleet-error").hidden = !message;
  $("fleet-error").textContent = message;
}

const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);

function draw({ workers, queues, models, generations, used }) {
  const live = workers.filter(({ state }) => state !== "lost");
  const figures = [
    [whole(sum(live, "tokens_per_s")), "tokens a second"],
    [whole(sum(live, "running")), "running"],
    [whole(sum(live, "waiting") + (queues ? sum(queues, "waiting") : 0)), "waiting"],
    [whole(live.length), live.length === 1 ? "worker" : "workers"],
  ];
  $("figures").replaceChildren(...figures.map(([value, label]) => make("div", {}, make("b", {}, value), make("span", {}, label))));
  $("workers").replaceChildren(...(workers.length ? workers.map(card) : [nothing("No worker is running.")]));
  if (!generations.length && $("generations").contains(document.activeElement)) $("main").focus();
  $("generations-part").hidden = !generations.length;
  table("generations", ["Asked for", "Model", "Worker", "For", ""], generations.map((one) => [
    one.kind, one.model, one.worker, `${whole(one.age_s)} s`, cancelling(one),
  ]), [3]);
  $("usage-part").hidden = !used.length;
  table("usage", ["Tenant", "Model", "Requests", "Tokens in", "From the cache", "Tokens out"], used.map((one) => [
    one.tenant || "everybody", one.model, ...["requests", "input_tokens", "input_cached_tokens", "output_tokens"].map((name) => whole(one[name])),
  ]), [2, 3, 4, 5]);
  table("queues", ["Queue", "Waiting", "By priority", "Workers"], queues?.map((queue) => [
    queue.queue, whole(queue.waiting),
    Object.entries(queue.by_priority).filter(([, length]) => length).map(([priority, length]) => `${priority}: ${length}`).join(", "),
    whole(queue.workers),
  ]), [1, 3], "The queues cannot be counted from here.");
  table("models", ["Model", "Queue", "Answers", "Context", "Adapters", "State"], models.map((model) => [
    model.names.join(", "), model.queues.join(", "), model.takes.join(", "), whole(model.max_model_len), model.adapters.join(", "),
    make("span", { className: model.live ? "state" : "state other" }, model.live ? "live" : "no worker now"),
  ]), [3], "No model has been served.");
}

function table(id, heads, rows, numbers, otherwise = "") {
  if (!rows?.length) {
    $(id).replaceChildren(nothing(otherwise));
    return;
  }
  const cell = (name, properties) => (value, place) => make(name, { ...properties, className: numbers.includes(place) ? "number" : "" }, value);
  const made = make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head, place) => (head ? cell("th", { scope: "col" }) : cell("td", {}))(head, place)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell("td", {}))))));
  // The table is new, and where a person is in it stays: how far it is scrolled, and what has the focus.
  const kept = $(id).querySelector(".scroll");
  const where = kept ?? make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: `Table of ${id}` });
  const focused = where.contains(document.activeElement) && document.activeElement.dataset.generation;
  where.replaceChildren(made);
  if (!kept) $(id).replaceChildren(where);
  if (focused) (where.querySelector(`[data-generation="${focused}"]`) ?? where).focus();
}

function cancelling({ handle, kind }) {
  const button = make("button", { type: "button", className: "quiet small", ariaLabel: `Cancel this ${kind}` }, "Cancel");
  button.dataset.generation = handle;
  button.addEventListener("click", async () => {
    if (button.ariaDisabled) return;
    button.ariaDisabled = "true"; // a button that is really disabled loses the focus
    button.textContent = "Cancelling …";
    await ask(`v1/fleet/generations/${handle}/cancel`, { method: "POST" }).catch(() => {});
    look();
  });
  return button;
}

function card(worker) {
  const lost = worker.state === "lost";
  const known = [...(rates.get(worker.worker) ?? []), lost ? 0 : worker.tokens_per_s].slice(-REMEMBERED);
  rates.set(worker.worker, known);
  const kind = lost ? "state lost" : worker.state === "ready" ? "state" : "state other";
  const about = [worker.model.split("/").at(-1), worker.device, worker.weight_format, worker.kernels].filter(Boolean).join(" · ");
  return make("article", { className: lost ? "card lost" : "card", ariaLabel: `Worker ${worker.worker}` },
    make("header", {}, make("h3", { title: worker.worker }, worker.worker), make("span", { className: kind }, lost ? `lost ${whole(worker.age_s)} s ago` : worker.state)),
    make("div", { className: "about", title: about }, about),
    make("div", { className: "rate" }, make("b", {}, whole(lost ? 0 : worker.tokens_per_s), make("small", {}, " tokens/s")), spark(known)),
    meter("Slots", worker.running, worker.slots, `${worker.running} of ${worker.slots}`),
    meter("Pages", worker.pages_used, worker.pages_total),
    meter("Prefix hits", worker.hit_rate, 1));
}

function spark(values) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  made.setAttribute("viewBox", "0 0 100 30");
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("class", "spark");
  made.setAttribute("aria-hidden", "true");
  line.setAttribute("vector-effect", "non-scaling-stroke");
  const most = Math.max(1, ...values);
  const step = 100 / (REMEMBERED - 1);
  line.setAttribute("points", values.map((value, place) => `${100 - (values.length - 1 - place) * step},${29 - (27 * value) / most}`).join(" "));
  made.append(line);
  return made;
}
