// npm: @anthropic-ai/sdk zod
// Anthropic's own for Node.
import assert from 'node:assert';
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { z } from 'zod';
import * as s from './steps.mjs';

const client = new Anthropic({ baseURL: s.ROOT, apiKey: 'none', maxRetries: 0 });
const asked = { model: s.MODEL, max_tokens: 100, temperature: 0 };
const said = (content) => [{ role: 'user', content }];

async function chat() {
  const whole = await client.messages.create({ ...asked, messages: said(s.SHORT) });
  assert.equal(whole.content[0].text, s.COUNTED);
  assert.equal(whole.stop_reason, 'end_turn');
}

async function stream() {
  const events = client.messages.stream({ ...asked, messages: said(s.SHORT) });
  assert.equal(await events.finalText(), s.COUNTED);
}

async function tools() {
  const cities = [];
  const weather = betaZodTool({
    name: 'weather', description: 'How warm a city is.', inputSchema: z.object({ city: z.string() }),
    run: ({ city }) => { cities.push(city); return '{"celsius": 20}'; },
  });
  const runner = client.beta.messages.toolRunner({
    model: s.SCRIPTED, max_tokens: 1000, messages: said(s.THREE_ROUNDS), tools: [weather],
  });
  const last = await runner;
  assert.equal(last.content[0].text, s.AFTER_THREE_ROUNDS);
  assert.deepEqual(cities, ['Rome', 'Oslo', 'Lima']);
}

async function structured() {
  const format = zodOutputFormat(z.object({ name: z.string(), age: z.number().int() }));
  const made = await client.messages.parse({ ...asked, messages: said(s.ABOUT_ANA), output_config: { format } });
  assert.deepEqual(made.parsed_output, { name: 'Ana', age: 31 });
}

async function abort() {
  const events = await client.messages.create({
    model: s.SCRIPTED, max_tokens: 30_000, messages: said(s.ENDLESS), stream: true,
  });
  await s.waitUntilRunning();
  events.controller.abort();
  await s.waitUntilIdle();
}

async function error() {
  await assert.rejects(client.messages.create({ ...asked, model: 'none', messages: said(s.SHORT) }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...asked, messages: said(s.TOO_LONG) }), Anthropic.BadRequestError);
}

await s.run(import.meta.url, {
  chat, stream, tools, structured, abort, error, resume: s.lacks('asks anew'),
}, ['error', 'tools']); // the runner of tools asks for threads first, and goes on without
