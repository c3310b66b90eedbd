// What goes with the next message: pictures, made small enough to send and smaller still to keep, and files of text.
import { $, make } from "./http.js";

const WHOLE = 1280, THUMB = 192; // pixels of the longer side
const MOST_BYTES = 256 * 1024; // of a file of text
let changed = () => {};
let allowed = false;

export let chosen = [];

/** `then` is called when something is added or removed. */
export function ready(then) { changed = then; }

/** Whether the model takes pictures. Text goes to every model. */
export function allow(now) {
  allowed = now;
  $("file").accept = now ? "image/*,text/*,.md,.json,.csv,.py,.js,.log,.yaml,.toml" : "text/*,.md,.json,.csv,.py,.js,.log,.yaml,.toml";
  $("attach").setAttribute("aria-label", now ? "Add a picture or a text" : "Add a text");
}

export function taken() {
  const all = chosen;
  chosen = [];
  draw();
  return all;
}

const CUT = "…cut";

/** Whether the request still has the data of its pictures. */
export const complete = (body) => !JSON.stringify(body.input).includes(`${CUT}"`);

/** A request without the data of its pictures, to be kept or shown. */
export function without(body) {
  return JSON.parse(JSON.stringify(body, (name, value) => (name === "image_url" && value.startsWith("data:") ? `${value.slice(0, 22)}${CUT}` : value)));
}

/** The parts of a message with these. */
export const partsOf = (all) => all.map(({ whole, name, text }) => (whole
  ? { type: "input_image", image_url: whole }
  : { type: "input_text", text: `${name}:\n\`\`\`\n${text}\n\`\`\`\n` }));

function drawn(bitmap, most, kind) {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const canvas = Object.assign(document.createElement("canvas"), { width: Math.max(1, bitmap.width * scale), height: Math.max(1, bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(kind, 0.9);
}

async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name}: must have at most ${MOST_BYTES / 1024} KiB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* said below */ }
  throw new Error(`${file.name}: must be text in UTF-8.`);
}

async function add(files) {
  $("refused").textContent = "";
  for (const file of files) {
    try {
      if (file.type.startsWith("image/")) {
        if (!allowed) throw new Error(`${file.name}: this model takes no pictures.`);
        const bitmap = await createImageBitmap(file).catch(() => { throw new Error(`${file.name}: is no picture that this browser knows.`); });
        chosen.push({ whole: drawn(bitmap, WHOLE, file.type === "image/png" ? "image/png" : "image/jpeg"), thumb: drawn(bitmap, THUMB, "image/jpeg") });
      } else {
        chosen.push({ name: file.name, text: await textOf(file) });
      }
    } catch (error) {
      $("refused").textContent = error.message;
    }
  }
  draw();
}

function draw() {
  $("pictures").hidden = !chosen.length;
  $("pictures").replaceChildren(...chosen.map((one) => {
    const button = make("button", { type: "button", ariaLabel: `Remove ${one.name ?? "this picture"}` },
      one.thumb ? make("img", { src: one.thumb, alt: "" }) : make("span", { className: "file" }, one.name));
    button.addEventListener("click", () => { chosen = chosen.filter((other) => other !== one); draw(); });
    return make("li", {}, button);
  }));
  changed();
}

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { add([...$("file").files]); $("file").value = ""; });
$("said").addEventListener("paste", (event) => { if (event.clipboardData.files.length) add([...event.clipboardData.files]); });
$("composer").addEventListener("dragover", (event) => event.preventDefault());
$("composer").addEventListener("drop", (event) => { event.preventDefault(); add([...event.dataTransfer.files]); });
