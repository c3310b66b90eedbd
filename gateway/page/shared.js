// Conversations that the gateway keeps for all keys of a tenant. Without a key there are none.
import { ask, keyed } from "./http.js";

const PAGE = 100;

const read = (path, options) => ask(path, options).then((answer) => answer.json());

/** The tenant's conversations, the one used last first; null where there are none to list. */
export const list = () => (keyed() ? read(`v1/conversations?limit=${PAGE}`).then(({ data }) => data, () => null) : null);

/** The id of a new one, which is listed; null: the gateway keeps none. */
export const begin = (title) => (keyed() ? read("v1/conversations", { body: { metadata: { title, petiole_listed: "true" } } }).then(({ id }) => id, () => null) : null);

export const remove = (id) => ask(`v1/conversations/${id}`, { method: "DELETE" }).catch(() => {});

/** Its turns, as the page shows them; none if it is known no longer. */
export async function turnsOf(id, model) {
  const items = [];
  try {
    for (let more = true, after = ""; more; after = `&after=${items.at(-1)?.id}`) {
      const page = await read(`v1/conversations/${id}/items?order=asc&limit=${PAGE}${after}`);
      items.push(...page.data);
      more = page.has_more;
    }
  } catch {
    return [];
  }
  return asTurns(items, model);
}

const textOf = ({ content, summary }) => [...(content ?? []), ...(summary ?? [])].map(({ text }) => text ?? "").join("");

function asTurns(items, model) {
  const turns = [], calls = {};
  const turn = (said) => {
    turns.push({ said, answer: { id: null, body: { model, input: said ?? [] }, status: "completed", parts: [], resumed: 0, gap: 0 } });
    return turns.at(-1).answer;
  };
  for (const item of items) {
    if (item.type === "message" && item.role !== "assistant") turn(textOf(item));
    else if (item.call_id && "output" in item) {
      if (item.call_id in calls) calls[item.call_id].output = String(item.output);
      if (turns.at(-1)?.answer.parts.length) turn();
    } else {
      const { parts } = turns.at(-1)?.answer ?? turn();
      if (item.type === "message") parts.push({ kind: "text", text: textOf(item) });
      else if (item.type === "reasoning") parts.push({ kind: "thought", text: textOf(item) });
      else if (item.call_id) {
        const { type, name, namespace, call_id } = item;
        parts.push(calls[call_id] = { kind: "call", type, text: item.arguments ?? item.input ?? "", name, namespace, call_id });
      }
    }
  }
  return turns;
}
