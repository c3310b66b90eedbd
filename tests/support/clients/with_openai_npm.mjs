// npm: openai zod
// OpenAI's own for Node.
import assert from 'node:assert';
import OpenAI, { toFile } from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import * as s from './steps.mjs';

const client = new OpenAI({ baseURL: s.URL, apiKey: 'none', maxRetries: 0 });
const asked = { model: s.MODEL, temperature: 0 };
const said = (content) => [{ role: 'user', content }];
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const Person = z.object({ name: z.string(), age: z.number().int() });

async function chat() {
  const { choices } = await client.chat.completions.create({ ...asked, messages: said(s.SHORT) });
  assert.equal(choices[0].message.content, s.COUNTED);
  assert.equal((await client.responses.create({ ...asked, input: s.SHORT })).output_text, s.COUNTED);
}

async function stream() {
  let joined = '';
  for await (const chunk of await client.chat.completions.create({ ...asked, messages: said(s.SHORT), stream: true })) {
    joined += chunk.choices[0].delta.content ?? '';
  }
  assert.equal(joined, s.COUNTED);
  joined = '';
  for await (const event of await client.responses.create({ ...asked, input: s.SHORT, stream: true })) {
    if (event.type === 'response.output_text.delta') joined += event.delta;
  }
  assert.equal(joined, s.COUNTED);
}

async function tools() {
  const cities = [];
  const weather = ({ city }) => { cities.push(city); return { celsius: 20 }; };
  const runner = client.chat.completions.runTools({
    model: s.SCRIPTED, messages: said(s.THREE_ROUNDS), stream: true,
    tools: [{ type: 'function', function: { name: 'weather', parameters, parse: JSON.parse, function: weather } }],
  });
  assert.equal(await runner.finalContent(), s.AFTER_THREE_ROUNDS);
  assert.deepEqual(cities, ['Rome', 'Oslo', 'Lima']);
  let input = s.THREE_ROUNDS;
  let previous_response_id;
  for (const city of cities) {
    const made = await client.responses.create({
      model: s.SCRIPTED, input, previous_response_id, tools: [{ type: 'function', name: 'weather', parameters }],
    });
    const [call] = made.output.filter(({ type }) => type === 'function_call');
    assert.deepEqual(JSON.parse(call.arguments), { city });
    previous_response_id = made.id;
    input = [{ type: 'function_call_output', call_id: call.call_id, output: '{"celsius": 20}' }];
  }
}

async function structured() {
  const whole = await client.chat.completions.parse({
    ...asked, messages: said(s.ABOUT_ANA), response_format: zodResponseFormat(Person, 'person'),
  });
  assert.deepEqual(whole.choices[0].message.parsed, { name: 'Ana', age: 31 });
  const made = await client.responses.parse({
    ...asked, input: s.ABOUT_ANA, text: { format: zodTextFormat(Person, 'person') },
  });
  assert.deepEqual(made.output_parsed, { name: 'Ana', age: 31 });
}

async function abort() {
  for (const begin of [
    () => client.chat.completions.create({ model: s.SCRIPTED, messages: said(s.ENDLESS), stream: true }),
    () => client.responses.create({ model: s.SCRIPTED, input: s.ENDLESS, stream: true }),
  ]) {
    const events = await begin();
    await s.waitUntilRunning();
    events.controller.abort();
    await s.waitUntilIdle();
  }
}

async function error() {
  await assert.rejects(client.chat.completions.create({ ...asked, model: 'none', messages: said(s.SHORT) }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ ...asked, messages: said(s.TOO_LONG) }),
    (refused) => refused instanceof OpenAI.BadRequestError && refused.code === 'context_length_exceeded',
  );
}

async function resume() {
  const first = [];
  for await (const event of await client.responses.create({ ...asked, input: s.SHORT, stream: true, background: true })) {
    first.push(event);
    if (first.length === 3) break;
  }
  const { id } = first[0].response;
  const rest = [];
  const starting_after = first.at(-1).sequence_number;
  for await (const event of await client.responses.retrieve(id, { stream: true, starting_after })) rest.push(event);
  assert(rest[0].sequence_number > starting_after);
  assert.equal(rest.at(-1).response.output_text ?? rest.at(-1).response.output[0].content[0].text, s.COUNTED);
}

const ENDED = ['completed', 'failed', 'expired', 'cancelled'];
const line = (custom_id, more) => JSON.stringify({
  custom_id, method: 'POST', url: '/v1/chat/completions',
  body: { ...asked, max_tokens: 20, messages: said(s.SHORT), ...more },
});

async function begun(lines) {
  const file = await client.files.create({ file: await toFile(Buffer.from(lines.join('\n')), 'in.jsonl'), purpose: 'batch' });
  return client.batches.create({ input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h' });
}

async function ended({ id }) {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (ENDED.includes(batch.status)) return batch;
    await s.pause(200);
  }
}

const read = async (id) => (await (await client.files.content(id)).text()).trim().split('\n').map((one) => JSON.parse(one));

async function batches() {
  const batch = await ended(await begun([line('a'), line('b', { max_tokens: 0 })]));
  assert.equal(batch.status, 'completed');
  assert.deepEqual(batch.request_counts, { total: 2, completed: 1, failed: 1 });
  const [good] = await read(batch.output_file_id);
  assert.equal(good.custom_id, 'a');
  assert.equal(good.response.body.choices[0].message.content, s.COUNTED);
  const [bad] = await read(batch.error_file_id);
  assert.equal(bad.response.status_code, 400);
  const long = await begun(Array.from({ length: 300 }, (_, k) => line(`${k}`, { max_tokens: 200, ignore_eos: true })));
  await client.batches.cancel(long.id);
  assert.equal((await ended(long)).status, 'cancelled');
  const listed = [];
  for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
  assert(listed.includes(batch.id) && listed.includes(long.id));
  await client.files.delete(batch.input_file_id);
  await s.waitUntilIdle();
}

await s.run(import.meta.url, { chat, stream, tools, structured, abort, error, resume, batches });
