// Vercel's AI SDK: three ways to the same gateway, whole, streamed, and with a schema.
import assert from 'node:assert';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, streamText } from 'ai';
import { z } from 'zod';

const baseURL = process.argv[2];
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({
  name: 'petiole', baseURL, supportsStructuredOutputs: true,
});
const prompt = 'Count from 1 to 5.';
for (const model of [
  openai.responses('petiole-tiny'), openai.chat('petiole-tiny'), compatible('petiole-tiny'),
]) {
  const { text } = await generateText({ model, prompt, temperature: 0 });
  assert(text.includes('1, 2, 3'), text);
  let joined = '';
  for await (const piece of streamText({ model, prompt, temperature: 0 }).textStream) joined += piece;
  assert.equal(joined, text);
  const { object } = await generateObject({
    model, temperature: 0, schema: z.object({ name: z.string(), age: z.number().int() }),
    prompt: 'Extract name and age as JSON: Ana is 31.',
  });
  assert.equal(typeof object.age, 'number');
}
console.log('fine');
