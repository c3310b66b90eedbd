// What the programs for Node share, as steps.py is for Python: `await run(import.meta.url, { chat, stream, ... })`.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';

export const URL = process.argv[2];
export const ROOT = URL.replace(/\/v1$/, '');
export const MODEL = 'petiole-tiny-tools';
export const SCRIPTED = 'scripted';
export const SHORT = 'Count from 1 to 5.';
export const COUNTED = '1, 2, 3, 4, 5';
export const ABOUT_ANA = 'Extract name and age as JSON: Ana is 31.';
export const TOO_LONG = 'one two three '.repeat(2000);

export const reciting = (...answers) => `Recite: ${JSON.stringify(answers)}`;
export const calling = (name, args) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;
export const AFTER_THREE_ROUNDS = 'It is 20 degrees everywhere.';
export const THREE_ROUNDS = reciting(
  ...['Rome', 'Oslo', 'Lima'].map((city) => calling('weather', { city })), AFTER_THREE_ROUNDS,
);
export const ENDLESS = reciting('and so on '.repeat(1000));

const PATIENCE_MS = 600_000;  // a busy machine is no fault of a client

class Lacks { constructor(why) { this.why = why; } }
export const lacks = (why) => new Lacks(why);

export const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

export async function waitUntilIdle() {
  for (const deadline = Date.now() + PATIENCE_MS; ;) {
    const { generations } = await (await fetch(`${URL}/fleet`)).json();
    if (!generations.length) return;
    assert(Date.now() < deadline, JSON.stringify(generations));
    await pause(200);
  }
}

export async function waitUntilRunning() {
  for (const deadline = Date.now() + PATIENCE_MS; ;) {
    const { generations } = await (await fetch(`${URL}/fleet`)).json();
    if (generations.length) return;
    assert(Date.now() < deadline);
    await pause(50);
  }
}

async function refused() {
  const text = await (await fetch(`${ROOT}/metrics`)).text();
  const lines = text.matchAll(/^petiole_gateway_requests_total\{.*path="(.*?)",status="(?!499)([45]\d\d)"\} (\S+)/gm);
  return new Map([...lines].map(([, path, status, count]) => [`${path} ${status}`, Number(count)]));
}

async function ran(step, mayBeRefused) {
  const before = await refused();
  await step();
  const more = [...await refused()].filter(([which, count]) => count > (before.get(which) ?? 0));
  assert(mayBeRefused || !more.length, `the gateway refused ${more.map(([which]) => which)}`);
}

export async function run(program, steps, mayBeRefused = ['error']) {
  const [, client] = readFileSync(new globalThis.URL(program), 'utf8').match(/^\/\/ npm: (\S+)/m);
  const { version } = JSON.parse(readFileSync(new globalThis.URL(`node_modules/${client}/package.json`, program)));
  console.log(JSON.stringify({ client, version }));
  for (const [step, does] of Object.entries(steps)) {
    if (does instanceof Lacks) {
      console.log(JSON.stringify({ step, lacks: does.why }));
      continue;
    }
    const failed = await ran(does, mayBeRefused.includes(step)).then(() => undefined, (error) => String(error?.stack ?? error));
    console.log(JSON.stringify({ step, failed }));
  }
  process.exit(0); // some clients keep connections
}
