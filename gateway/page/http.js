// Requests to the gateway, with the key if it asks for one; streams of events; the DOM in few words.

export const $ = (id) => document.getElementById(id);

/** An element with these properties and children. Text is text: nothing is read as HTML. */
export function make(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const url = (path) => new URL(path, new URL("./", document.baseURI)).href;

/** The gateway has answered, and refuses. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

/** Copies a text. Browsers offer a clipboard to pages of https alone; others get what a person would do. */
export async function copy(text, button) {
  const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false) ?? false;
  if (!copied) {
    const field = make("textarea", { value: text, className: "unseen", readOnly: true });
    const where = document.querySelector("dialog[open]") ?? document.body, focused = document.activeElement;
    where.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    focused?.focus();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

let asking = null; // one dialog for all requests that lack a key

function askForKey(refused) {
  asking ??= new Promise((done) => {
    const dialog = $("key");
    $("key-refused").hidden = !refused;
    dialog.addEventListener("close", () => {
      const field = dialog.querySelector("input");
      if (field.value) sessionStorage.setItem("petiole.key", field.value);
      field.value = "";
      asking = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** Whether requests go with a key. */
export const keyed = () => Boolean(sessionStorage.getItem("petiole.key"));

/** The answer to a request that is fine. Throws `Refused`, or what `fetch` throws when nobody answers. */
export async function ask(path, { body, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem("petiole.key");
    const headers = { ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
    const sent = body && { method: "POST", body: JSON.stringify(body) };
    const answer = await fetch(url(path), { ...sent, ...options, headers });
    if (answer.status === 401) {
      if (sessionStorage.getItem("petiole.key") === key) sessionStorage.removeItem("petiole.key");
      await askForKey(Boolean(key));
    } else if (answer.ok) {
      return answer;
    } else {
      const told = await answer.json().catch(() => ({}));
      throw new Refused(answer.status, told.error?.message ?? `status ${answer.status}`, told.error?.code);
    }
  }
}

/** The events of a stream, one by one, as objects. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

export const pause = (ms, signal) => new Promise((done) => {
  const timer = setTimeout(done, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});
