// An answer is a stored response. The page keeps its id and nothing that is generated: it reads the events again
// from the number that it lacks, at whichever gateway answers, until the last one has come.
import { Refused, ask, events, pause } from "./http.js";

const KINDS = { message: "text", reasoning: "thought", function_call: "call", custom_tool_call: "call" };
const ENDS = { "response.completed": 1, "response.incomplete": 1, "response.failed": 1 };
const LONGEST_PAUSE_MS = 3000;
const GAP_MS = 2500; // a silence in mid-answer that is worth telling

/** What is kept of a new answer. `body`: its request. */
export const answerTo = (body) => ({ body, id: null, status: "sending", parts: [], resumed: 0, gap: 0 });

export const running = (answer) => ["sending", "queued", "in_progress"].includes(answer.status);

/** What an event changes. */
export function take(answer, event) {
  answer.seen = event.sequence_number;
  switch (event.type) {
    case "response.created":
    case "response.queued":
    case "response.in_progress":
      answer.id = event.response.id;
      answer.status = event.response.status;
      return;
    case "response.output_item.added": {
      const { type, name, namespace, call_id } = event.item;
      answer.parts[event.output_index] = { kind: KINDS[type], type, text: "", name, namespace, call_id };
      return;
    }
    case "response.output_text.delta":
    case "response.reasoning_text.delta":
    case "response.function_call_arguments.delta":
    case "response.custom_tool_call_input.delta":
      answer.parts[event.output_index].text += event.delta;
      return;
  }
  if (event.type in ENDS) {
    answer.status = event.response.status;
    answer.usage = event.response.usage;
    answer.error = event.response.error?.message;
  }
}

/** Follows an answer to its end. `changed` is called after each change. */
export async function follow(answer, changed, signal) {
  let lost = 0, heard = 0, response = null;
  Object.assign(answer, { parts: [], seen: undefined }); // whatever was shown before a reload is read again
  while (!signal.aborted) {
    try {
      response ??= await (answer.id === null
        ? ask("v1/responses", { body: answer.body, signal })
        : ask(`v1/responses/${answer.id}?stream=true${answer.seen === undefined ? "" : `&starting_after=${answer.seen}`}`, { signal }));
      for await (const event of events(response)) {
        if (event.type === "error") throw new Refused(503, event.message);
        take(answer, event);
        const now = performance.now();
        if (lost) answer.resumed += 1;
        if (heard && now - heard > GAP_MS) answer.gap = Math.max(answer.gap, (now - heard) / 1000);
        if (answer.parts.length) {
          heard = now;
          answer.first ??= now;
        }
        lost = 0;
        answer.waiting = "";
        if (!running(answer)) answer.took = now - answer.first;
        changed();
        if (!running(answer)) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      const final = error instanceof Refused && error.status < 500 && error.status !== 429;
      if (final || answer.id === null) {
        answer.status = "failed";
        answer.code = error.code;
        answer.error = error instanceof Refused ? error.message : "the gateway does not answer";
        changed();
        return;
      }
    }
    response = null;
    lost += 1;
    answer.waiting = "Connection lost. Reading on …";
    changed();
    await pause(Math.min(150 * 2 ** lost, LONGEST_PAUSE_MS), signal);
  }
}
