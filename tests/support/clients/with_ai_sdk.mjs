// npm: ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
// Vercel's AI SDK: four ways to the same gateway.
import assert from 'node:assert';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, isStepCount, streamText, tool } from 'ai';
import { z } from 'zod';
import * as s from './steps.mjs';

const openai = createOpenAI({ baseURL: s.URL, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'petiole', baseURL: s.URL, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: s.URL, apiKey: 'none' });
const models = (name = s.MODEL) => [openai.responses(name), openai.chat(name), compatible(name), anthropic(name)];
const common = { temperature: 0, maxRetries: 0, maxOutputTokens: 1000 };

async function chat() {
  for (const model of models()) {
    assert.equal((await generateText({ ...common, model, prompt: s.SHORT })).text, s.COUNTED);
  }
}

async function stream() {
  for (const model of models()) {
    let joined = '';
    for await (const piece of streamText({ ...common, model, prompt: s.SHORT }).textStream) joined += piece;
    assert.equal(joined, s.COUNTED);
  }
}

async function tools() {
  for (const model of models(s.SCRIPTED)) {
    const cities = [];
    const weather = tool({
      description: 'How warm a city is.', inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => { cities.push(city); return { celsius: 20 }; },
    });
    const { text } = await generateText({
      ...common, model, prompt: s.THREE_ROUNDS, tools: { weather }, stopWhen: isStepCount(6),
    });
    assert.equal(text, s.AFTER_THREE_ROUNDS);
    assert.deepEqual(cities, ['Rome', 'Oslo', 'Lima']);
  }
}

async function structured() {
  const output = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });
  for (const model of models()) {
    const made = await generateText({ ...common, model, prompt: s.ABOUT_ANA, output });
    assert.equal(typeof made.output.age, 'number');
  }
}

async function abort() {
  for (const model of models(s.SCRIPTED)) {
    const leaving = new AbortController();
    const { textStream } = streamText({
      ...common, maxOutputTokens: 20_000, model, prompt: s.ENDLESS, abortSignal: leaving.signal,
    });
    const all = (async () => { for await (const _ of textStream); })().catch(() => {});
    await s.waitUntilRunning();
    leaving.abort();
    await all;
    await s.waitUntilIdle();
  }
}

async function error() {
  for (const model of models()) {
    await assert.rejects(
      generateText({ ...common, model, prompt: s.TOO_LONG }), /maximum context length is 2048 tokens/,
    );
  }
}

await s.run(import.meta.url, { chat, stream, tools, structured, abort, error, resume: s.lacks('asks anew') });
