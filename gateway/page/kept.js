// Conversations in this browser: each under a name of its own, so tabs keep apart what they show. A tab knows the
// name of its conversation. What cannot be read is left out; what does not fit drops the oldest ones.
const OF = "petiole.talk.", OPEN = "petiole.open", WAYS = "petiole.ways", BEFORE = "petiole.chat";
const TITLE = 60; // characters

function read(key, otherwise) {
  try {
    const value = JSON.parse(localStorage.getItem(key));
    return value && typeof value === "object" && !Array.isArray(value) ? value : otherwise;
  } catch {
    return otherwise;
  }
}

const sound = ({ answer }) => answer && typeof answer === "object" && Array.isArray(answer.parts) && typeof answer.status === "string";

/** The conversations, the newest first: `{ name, title, at, conversation }`. */
export function list() {
  const names = [];
  try {
    for (let k = 0; k < localStorage.length; k += 1) if (localStorage.key(k).startsWith(OF)) names.push(localStorage.key(k).slice(OF.length));
  } catch { /* the browser forbids it */ }
  return names.map((name) => ({ name, title: "", at: 0, ...read(OF + name, {}) })).sort((one, other) => other.at - one.at);
}

export const turnsOf = (name) => (read(OF + name, {}).turns ?? []).filter((turn) => turn && sound(turn));

/** The id of the same conversation at the gateway, if it is kept there, too. */
export const conversationOf = (name) => read(OF + name, {}).conversation ?? null;

/** Stores a value; where there is no room, instead of the oldest other conversations. Says whether it is stored. */
function write(key, value) {
  for (;;) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      const oldest = list().findLast(({ name }) => OF + name !== key);
      if (!oldest) return false;
      remove(oldest.name);
    }
  }
}

export function remove(name) {
  try { localStorage.removeItem(OF + name); } catch { /* as above */ }
}

export const titleOf = (turns) => (turns.find(({ said }) => said)?.said ?? "Pictures").slice(0, TITLE);

/** Keeps a conversation; one without turns is forgotten. */
export function keep(name, turns, conversation = null) {
  if (!turns.length) {
    remove(name);
    return true;
  }
  return write(OF + name, { title: titleOf(turns), at: Date.now(), turns, conversation });
}

/** How answers are asked for, the same for all conversations. */
export const ways = () => read(WAYS, {});
export const keepWays = (now) => write(WAYS, now);

/** The name of this tab's conversation. */
export function open(name) {
  try {
    if (name) sessionStorage.setItem(OPEN, name);
    return sessionStorage.getItem(OPEN) ?? open(fresh());
  } catch {
    return name ?? fresh();
  }
}

export const fresh = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

// What the version before has kept.
const before = read(BEFORE, null);
if (before) {
  try { localStorage.removeItem(BEFORE); } catch { /* as above */ }
  const { turns = [], settings = {}, model = "" } = before;
  keepWays({ settings, model });
  keep(open(), Array.isArray(turns) ? turns.filter((turn) => turn && sound(turn)) : []);
}
