// OpenAI's own client for Node.
import assert from 'node:assert';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none' });
const asked = { model: 'petiole-tiny', temperature: 0 };
const messages = [{ role: 'user', content: 'Count from 1 to 5.' }];
const whole = (await client.chat.completions.create({ ...asked, messages })).choices[0].message.content;
assert(whole.includes('1, 2, 3'), whole);
let joined = '';
for await (const chunk of await client.chat.completions.create({ ...asked, messages, stream: true })) {
  joined += chunk.choices[0].delta.content ?? '';
}
assert.equal(joined, whole);
const response = await client.responses.create({ ...asked, input: messages[0].content });
assert(response.output_text.includes('1, 2, 3'), response.output_text);
let streamed = '';
for await (const event of await client.responses.create({ ...asked, input: messages[0].content, stream: true })) {
  if (event.type === 'response.output_text.delta') streamed += event.delta;
}
assert.equal(streamed, response.output_text);
console.log('fine');
