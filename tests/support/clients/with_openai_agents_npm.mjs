// npm: @openai/agents openai zod
// OpenAI's Agents SDK for Node: an agent over either interface.
import assert from 'node:assert';
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';
import * as s from './steps.mjs';

setTracingDisabled(true);
const client = new OpenAI({ baseURL: s.URL, apiKey: 'none', maxRetries: 0 });
const agents = (model = s.MODEL, more = {}) => [OpenAIChatCompletionsModel, OpenAIResponsesModel].map(
  (Kind) => new Agent({ name: 'agent', model: new Kind(client, model), modelSettings: { temperature: 0 }, ...more }),
);

async function chat() {
  for (const agent of agents()) assert.equal((await run(agent, s.SHORT)).finalOutput, s.COUNTED);
}

async function stream() {
  for (const agent of agents()) {
    const streamed = await run(agent, s.SHORT, { stream: true });
    let joined = '';
    for await (const piece of streamed.toTextStream()) joined += piece;
    assert.equal(joined, s.COUNTED);
  }
}

async function tools() {
  const cities = [];
  const weather = tool({
    name: 'weather', description: 'How warm a city is.', parameters: z.object({ city: z.string() }),
    execute: ({ city }) => { cities.push(city); return '{"celsius": 20}'; },
  });
  for (const agent of agents(s.SCRIPTED, { tools: [weather] })) {
    cities.length = 0;
    assert.equal((await run(agent, s.THREE_ROUNDS)).finalOutput, s.AFTER_THREE_ROUNDS);
    assert.deepEqual(cities, ['Rome', 'Oslo', 'Lima']);
  }
  const [agent] = agents(s.MODEL, { tools: [weather] });
  assert((await run(agent, 'How warm is it in Rome?')).finalOutput.includes('20 degrees in Rome'));
}

async function structured() {
  const Person = z.object({ name: z.string(), age: z.number().int() });
  for (const agent of agents(s.MODEL, { outputType: Person })) {
    assert.deepEqual((await run(agent, s.ABOUT_ANA)).finalOutput, { name: 'Ana', age: 31 });
  }
}

async function abort() {
  for (const agent of agents(s.SCRIPTED)) {
    const leaving = new AbortController();
    const streamed = await run(agent, s.ENDLESS, { stream: true, signal: leaving.signal });
    const all = (async () => { for await (const _ of streamed.toTextStream()); })().catch(() => {});
    await s.waitUntilRunning();
    leaving.abort();
    await all;
    await s.waitUntilIdle();
  }
}

async function error() {
  for (const agent of agents()) {
    await assert.rejects(run(agent, s.TOO_LONG), /maximum context length is 2048 tokens/);
  }
}

await s.run(import.meta.url, { chat, stream, tools, structured, abort, error, resume: s.lacks('asks anew') });
