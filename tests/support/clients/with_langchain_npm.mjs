// npm: @langchain/openai @langchain/core langchain zod
// LangChain.js: a chat model over either interface, and an agent.
import assert from 'node:assert';
import { ChatOpenAI } from '@langchain/openai';
import { createAgent, tool } from 'langchain';
import { z } from 'zod';
import * as s from './steps.mjs';

const models = (model = s.MODEL) => [false, true].map((useResponsesApi) => new ChatOpenAI({
  model, apiKey: 'none', temperature: 0, maxRetries: 0, useResponsesApi, configuration: { baseURL: s.URL },
}));

async function chat() {
  for (const model of models()) assert.equal((await model.invoke(s.SHORT)).text, s.COUNTED);
}

async function stream() {
  for (const model of models()) {
    let joined = '';
    for await (const piece of await model.stream(s.SHORT)) joined += piece.text;
    assert.equal(joined, s.COUNTED);
  }
}

async function tools() {
  for (const model of models(s.SCRIPTED)) {
    const cities = [];
    const weather = tool(({ city }) => { cities.push(city); return '{"celsius": 20}'; }, {
      name: 'weather', description: 'How warm a city is.', schema: z.object({ city: z.string() }),
    });
    const agent = createAgent({ model, tools: [weather] });
    const { messages } = await agent.invoke({ messages: [{ role: 'user', content: s.THREE_ROUNDS }] });
    assert.equal(messages.at(-1).text, s.AFTER_THREE_ROUNDS);
    assert.deepEqual(cities, ['Rome', 'Oslo', 'Lima']);
  }
}

async function structured() {
  const Person = z.object({ name: z.string(), age: z.number().int() });
  for (const model of models()) {
    const made = await model.withStructuredOutput(Person, { method: 'jsonSchema' }).invoke(s.ABOUT_ANA);
    assert.deepEqual(made, { name: 'Ana', age: 31 });
  }
}

async function abort() {
  for (const model of models(s.SCRIPTED)) {
    const leaving = new AbortController();
    const pieces = await model.stream(s.ENDLESS, { signal: leaving.signal });
    await s.waitUntilRunning();
    leaving.abort();
    await assert.rejects(async () => { for await (const _ of pieces); });
    await s.waitUntilIdle();
  }
}

async function error() {
  for (const model of models()) {
    await assert.rejects(model.invoke(s.TOO_LONG), /maximum context length is 2048 tokens/);
  }
}

await s.run(import.meta.url, { chat, stream, tools, structured, abort, error, resume: s.lacks('asks anew') });
