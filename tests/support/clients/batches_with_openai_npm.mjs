// Files and batches with OpenAI's own client for Node.
import assert from 'node:assert';
import OpenAI, { toFile } from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none' });
const messages = [{ role: 'user', content: 'Count from 1 to 5.' }];
const line = (custom_id, more) => JSON.stringify({
  custom_id, method: 'POST', url: '/v1/chat/completions',
  body: { model: 'petiole-tiny', temperature: 0, max_tokens: 8, messages, ...more },
});

async function begun(lines) {
  const file = await client.files.create({ file: await toFile(Buffer.from(lines.join('\n')), 'in.jsonl'), purpose: 'batch' });
  return client.batches.create({ input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h' });
}

async function ended({ id }) {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (['completed', 'failed', 'expired', 'cancelled'].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
}

const read = async (id) => (await (await client.files.content(id)).text()).trim().split('\n').map((one) => JSON.parse(one));

const batch = await ended(await begun([line('a'), line('b', { max_tokens: 0 })]));
assert.equal(batch.status, 'completed');
assert.deepEqual(batch.request_counts, { total: 2, completed: 1, failed: 1 });
const [good] = await read(batch.output_file_id);
assert.equal(good.custom_id, 'a');
assert(good.response.body.choices[0].message.content.includes('1, 2'), JSON.stringify(good));
const [bad] = await read(batch.error_file_id);
assert.equal(bad.response.status_code, 400);

const long = await begun(Array.from({ length: 300 }, (_, k) => line(`${k}`, { max_tokens: 200, ignore_eos: true })));
await client.batches.cancel(long.id);
assert.equal((await ended(long)).status, 'cancelled');
const listed = [];
for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
assert(listed.includes(batch.id) && listed.includes(long.id));
await client.files.delete(batch.input_file_id);
await assert.rejects(client.files.retrieve(batch.input_file_id), OpenAI.NotFoundError);
console.log('fine');
