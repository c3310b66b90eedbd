// What the views of the fleet and of the keys draw alike.
import { make } from "./http.js";

export const whole = (number) => Math.round(number).toLocaleString("en");

export const nothing = (text) => make("p", { className: "note" }, text);

export function meter(label, value, most, text = null) {
  const part = most ? Math.min(1, value / most) : 0;
  const bar = make("i", { ariaHidden: "true" });
  bar.style.setProperty("--part", `${(100 * part).toFixed(1)}%`);
  return make("div", { className: "meter" }, make("span", {}, label), bar, make("span", {}, text ?? `${Math.round(100 * part)}%`));
}
