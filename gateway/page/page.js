// The shell: views, colours, the key, and requests to the gateway.
import * as chat from "./chat.js";
import * as fleet from "./fleet.js";
import { $ } from "./http.js";
import * as keys from "./keys.js";

const VIEWS = { chat, fleet, keys };

function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat";
  for (const [other, view] of Object.entries(VIEWS)) {
    $(other).hidden = other !== name;
    view.shown(other === name);
  }
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const one of ["fresh", "talks"]) $(one).style.visibility = name === "chat" ? "" : "hidden";
  document.title = name === "chat" ? "Petiole" : `Petiole: ${name}`;
}

const THEMES = { "": "as the system has them", light: "light", dark: "dark" };

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  $("theme").title = `Colours: ${THEMES[theme]}`;
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  try { localStorage.setItem("petiole.theme", next); } catch { /* no room: until the next reload */ }
  paint(next);
});

const kept = localStorage.getItem("petiole.theme") ?? "";
paint(kept in THEMES ? kept : "");
addEventListener("hashchange", show);
show();
keys.invite();
