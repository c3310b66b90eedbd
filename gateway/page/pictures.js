// Pictures of the next message: made small enough to send, and smaller still to keep.
import { $, make } from "./http.js";

const WHOLE = 1280, THUMB = 192; // pixels of the longer side
let changed = () => {};
let allowed = false;

export let chosen = [];

/** `then` is called when pictures are added or removed. */
export function ready(then) { changed = then; }

export function allow(now) {
  allowed = now;
  $("attach").hidden = !now;
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

function drawn(bitmap, most, kind) {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const canvas = Object.assign(document.createElement("canvas"), { width: Math.max(1, bitmap.width * scale), height: Math.max(1, bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(kind, 0.9);
}

async function add(files) {
  for (const file of files) {
    const bitmap = await createImageBitmap(file).catch(() => null);
    if (bitmap) chosen.push({ whole: drawn(bitmap, WHOLE, file.type === "image/png" ? "image/png" : "image/jpeg"), thumb: drawn(bitmap, THUMB, "image/jpeg") });
  }
  draw();
}

function draw() {
  $("pictures").hidden = !chosen.length;
  $("pictures").replaceChildren(...chosen.map((one) => {
    const button = make("button", { type: "button", ariaLabel: "Remove this picture" }, make("img", { src: one.thumb, alt: "" }));
    button.addEventListener("click", () => { chosen = chosen.filter((other) => other !== one); draw(); });
    return make("li", {}, button);
  }));
  changed();
}

const imagesOf = (list) => [...(list ?? [])].filter((file) => file.type.startsWith("image/"));

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { add(imagesOf($("file").files)); $("file").value = ""; });
$("said").addEventListener("paste", (event) => { if (allowed) add(imagesOf(event.clipboardData.files)); });
$("composer").addEventListener("dragover", (event) => event.preventDefault());
$("composer").addEventListener("drop", (event) => { event.preventDefault(); if (allowed) add(imagesOf(event.dataTransfer.files)); });
