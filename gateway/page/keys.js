// Tenants and their keys, for a key with the right `admin`: what they may, what they have used, and changes of both.
import { $, Refused, ask, copy, make } from "./http.js";
import { meter, nothing, whole } from "./shapes.js";

const KEY_LIMITS = {
  requests: "Requests a minute", input_tokens: "Tokens in a minute", output_tokens: "Tokens out a minute", concurrent: "Tasks at a time",
};
const TENANT_LIMITS = { day_tokens: "Tokens a day", month_tokens: "Tokens a month", ...KEY_LIMITS };
const LIMITS = { ...TENANT_LIMITS, files: "Files", file_bytes: "Bytes of files", batches: "Batches", batch_rows: "Rows of batches" };

let own = null; // the name of the key that looks

/** Shows the way here to those who may come. */
export async function invite() {
  const { id, rights } = await ask("v1/key").then((answer) => answer.json()).catch(() => ({ rights: [] }));
  own = id;
  document.querySelector("[data-view=keys]").hidden = !rights.includes("admin");
}

export function shown(now) {
  if (now) look();
}

async function look() {
  try {
    const [tenants, keys] = await Promise.all(["tenants", "keys"].map((what) => ask(`v1/admin/${what}`).then((answer) => answer.json())));
    draw(tenants.data, keys.data);
    complain("keys-error", "");
  } catch (error) {
    complain("keys-error", error instanceof Refused ? error.message : "The gateway does not answer.");
  }
}

function complain(id, message) {
  $(id).hidden = !message;
  $(id).textContent = message;
}

// ------------------------------------------------------------ what is shown

function draw(tenants, keys) {
  const focused = document.activeElement?.dataset.of;
  const known = new Map(tenants.map((tenant) => [tenant.id, tenant]));
  $("tenant-names").replaceChildren(...tenants.filter(inRedis).map(({ id }) => make("option", { value: id })));
  $("tenants").replaceChildren(...(known.size
    ? tenants.map((tenant) => card(tenant, keys.filter((key) => key.tenant === tenant.id)))
    : [nothing("There is no key yet.")]));
  if (focused) (document.querySelector(`[data-of="${focused}"]`) ?? $("key-new")).focus();
}

const inRedis = ({ source }) => source === "redis";
const dated = (seconds) => (seconds ? new Date(1000 * seconds).toISOString().slice(0, 10) : "");
const over = (seconds) => Boolean(seconds) && 1000 * seconds <= Date.now();

function limited(limits, but = {}) {
  return Object.entries(limits).filter(([name]) => !(name in but)).map(([name, value]) => `${LIMITS[name] ?? name}: ${whole(value)}`).join(" · ");
}

function card(tenant, keys) {
  const about = told([
    limited(tenant.limits, { day_tokens: 1, month_tokens: 1 }),
    tenant.models && `Models: ${tenant.models.join(", ") || "none"}`,
    tenant.queue && `Queue: ${tenant.queue}`,
    tenant.priority !== null && `Priority: ${tenant.priority}`,
    !inRedis(tenant) && "From the gateway's settings",
  ]);
  const change = inRedis(tenant) ? button("Change", `Change the tenant ${tenant.id}`, `tenant-${tenant.id}`, () => openTenant(tenant)) : null;
  return make("article", { className: "card", ariaLabel: `Tenant ${tenant.id}` },
    make("header", {}, make("h3", { title: tenant.id }, tenant.id), expiry(tenant.expires_at), change),
    ...about,
    used("Today", tenant, "day_tokens"),
    used("This month", tenant, "month_tokens"),
    keys.length ? table(tenant, keys) : nothing("It has no key."));
}

function used(label, { usage, limits }, name) {
  const most = limits[name];
  const made = meter(label, usage[name], most ?? 0, most ? `${whole(usage[name])} of ${whole(most)} tokens` : `${whole(usage[name])} tokens`);
  if (most) made.classList.add(usage[name] >= most ? "gone" : usage[name] >= 0.8 * most ? "near" : "far");
  return made;
}

function expiry(seconds) {
  if (!seconds) return null;
  return make("span", { className: over(seconds) ? "state lost" : "state other" }, `${over(seconds) ? "expired" : "expires"} ${dated(seconds)}`);
}

function table(tenant, keys) {
  const rows = keys.map((key) => make("tr", {},
    make("td", {}, make("code", {}, key.id)),
    make("td", { className: "wide" }, key.note, ...told([...key.rights.map((right) => `Right: ${right}`), limited(key.limits)])),
    labelled("Made", dated(key.created_at)),
    over(key.expires_at) ? make("td", {}, expiry(key.expires_at)) : labelled("Expires", dated(key.expires_at) || "never"),
    make("td", {}, ...(inRedis(key) ? [
      button("Change", `Change the key ${key.id}`, `key-${key.id}`, () => openKey(key)),
      button("Revoke", `Revoke the key ${key.id}`, `revoke-${key.id}`, () => openRevoke(key)),
    ] : ["settings"]))));
  const heads = ["Key", "For", "Made", "Expires", ""].map((head) => make(head ? "th" : "td", {}, head));
  return make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: `Keys of ${tenant.id}` },
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

/** A cell that says what it is where the table has no head: on a phone. */
function labelled(label, value) {
  const made = make("td", {}, value);
  made.dataset.label = label;
  return made;
}

function told(parts) {
  const text = parts.filter(Boolean).join(" · ");
  return text ? [make("div", { className: "told" }, text)] : [];
}

function button(text, label, of, act) {
  const made = make("button", { type: "button", className: "quiet small", ariaLabel: label }, text);
  made.dataset.of = of;
  made.addEventListener("click", act);
  return made;
}

// ------------------------------------------------------------ what is changed

/** Opens a dialog with these values. `save` gets those that a person has changed, one time after another; what it throws is shown there. */
function open(id, title, values, save) {
  const dialog = $(id), form = dialog.querySelector("form");
  form.querySelector("h2").textContent = title;
  complain(`${id}-error`, "");
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") field.checked = values[field.name] ?? false;
    else field.value = values[field.name] ?? "";
  }
  const read = () => new Map([...form.elements].filter(({ name }) => name).map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value.trim()]));
  const before = read();
  form.onsubmit = async (event) => {
    event.preventDefault();
    const focused = document.activeElement;
    event.submitter.disabled = true;
    try {
      const after = await save(Object.fromEntries([...read()].filter(([name, value]) => value !== before.get(name))));
      dialog.close();
      after?.();
      await look();
    } catch (error) {
      complain(`${id}-error`, error instanceof Refused ? error.message : "The gateway does not answer. Try again.");
    } finally {
      event.submitter.disabled = false;
      if (dialog.open) focused.focus();
    }
  };
  dialog.showModal();
}

/** What is sent of the fields that were changed. */
function asked(changed, known) {
  const body = {}, limits = {};
  for (const [name, value] of Object.entries(changed)) {
    if (name in known) limits[name] = value === "" ? null : Number(value);
    else if (name === "expires_at") body.expires_at = value ? Date.parse(`${value}T00:00:00Z`) / 1000 : null;
    else if (name === "admin") body.rights = value ? ["admin"] : [];
    else if (name === "models") body.models = value ? value.split(",").map((one) => one.trim()).filter(Boolean) : null;
    else if (name === "priority") body.priority = value === "" ? null : Number(value);
    else if (name === "queue") body.queue = value || null;
    else body[name] = value;
  }
  return Object.keys(limits).length ? { ...body, limits } : body;
}

const valuesOf = (one) => ({ ...one, ...one.limits, expires_at: dated(one.expires_at) });

function openKey(key = null) {
  const field = $("key-form").querySelector("[name=tenant]");
  field.disabled = Boolean(key);
  const values = key ? { ...valuesOf(key), admin: key.rights.includes("admin") } : {};
  open("key-form", key ? `Key ${key.id}` : "New key", values, async (changed) => {
    const body = asked(changed, KEY_LIMITS);
    if (body.rights && key) body.rights.push(...key.rights.filter((right) => right !== "admin"));
    const answer = await ask(key ? `v1/admin/keys/${key.id}` : "v1/admin/keys", { body }).then((one) => one.json());
    return key ? null : () => tellKey(answer);
  });
}

function tellKey({ key, tenant }) {
  $("made-tenant").textContent = tenant;
  $("made-key").textContent = key;
  $("made").addEventListener("close", () => { $("made-key").textContent = ""; }, { once: true });
  $("made").showModal();
}

function openTenant(tenant) {
  const values = { ...valuesOf(tenant), models: tenant.models?.join(", ") };
  open("tenant-form", `Tenant ${tenant.id}`, values, async (changed) => {
    await ask(`v1/admin/tenants/${tenant.id}`, { body: asked(changed, TENANT_LIMITS) });
  });
}

function openRevoke(key) {
  $("revoke-note").textContent = key.id === own
    ? "You look at this page with this key. Without another one you cannot come back."
    : `Whoever has it is refused within seconds. It is a key of ${key.tenant}${key.note && `, for ${key.note}`}.`;
  open("revoke", `Revoke the key ${key.id}?`, {}, async () => { await ask(`v1/admin/keys/${key.id}`, { method: "DELETE" }); });
}

function fields(id, names) {
  $(id).append(...Object.entries(names).map(([name, label]) => make("label", {}, label,
    make("input", { name, type: "number", min: "0", step: "1", placeholder: "any" }))));
}

fields("key-limits", KEY_LIMITS);
fields("tenant-limits", TENANT_LIMITS);
$("key-new").addEventListener("click", () => openKey());
$("made-copy").addEventListener("click", (event) => copy($("made-key").textContent, event.target));
for (const one of document.querySelectorAll("dialog [data-close]")) one.addEventListener("click", () => one.closest("dialog").close());
