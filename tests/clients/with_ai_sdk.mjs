// The `ai` SDK through `@ai-sdk/openai-compatible`.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { ADD, BASE_URL, FACT, FACT_ANSWER, KEY, MODEL, PERSON, SUM, SUM_ANSWER } from './common.mjs';

const slipstream = createOpenAICompatible({
  name: 'slipstream',
  baseURL: BASE_URL,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = slipstream(MODEL);
const PERSON_SHAPE = z.object({ name: z.string(), price: z.number().int() });
const add = tool({
  description: 'Add two numbers.',
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => a + b,
});

test('generateText', async () => {
  const answer = await generateText({ model, prompt: SUM, temperature: 0 });
  assert.equal(answer.text, SUM_ANSWER);
  assert.equal(answer.finishReason, 'stop');
  assert.ok(answer.usage.outputTokens > 0);
});

test('streamText', async () => {
  const answer = streamText({ model, prompt: FACT, temperature: 0 });
  const deltas = [];
  for await (const delta of answer.textStream) deltas.push(delta);
  assert.equal(deltas.join(''), FACT_ANSWER);
  assert.ok(deltas.length > 2);
  assert.ok((await answer.usage).outputTokens > 0);
});

test('completions', async () => {
  const answer = await generateText({
    model: slipstream.completionModel(MODEL), prompt: 'Once upon a time', maxOutputTokens: 8,
  });
  assert.ok(answer.text);
});

test('tools', async () => {
  const answer = await generateText({
    model, prompt: ADD, temperature: 0, tools: { add }, stopWhen: stepCountIs(3),
  });
  assert.equal(answer.text, 'The result is 579.');
  assert.equal(answer.steps.length, 2);
});

test('tools in a stream', async () => {
  const answer = streamText({
    model, prompt: ADD, temperature: 0, tools: { add }, stopWhen: stepCountIs(3),
  });
  assert.equal(await answer.text, 'The result is 579.');
});

test('a tool that must be called', async () => {
  const answer = await generateText({
    model, prompt: ADD, temperature: 0, tools: { add }, toolChoice: 'required', maxOutputTokens: 200,
  });
  assert.deepEqual(answer.toolCalls[0].input, { a: 123, b: 456 });
});

test('objects', async () => {
  const answer = await generateText({
    model, prompt: PERSON, temperature: 0, output: Output.object({ schema: PERSON_SHAPE }),
  });
  assert.deepEqual(answer.output, { name: 'Rosa', price: 27 });
});

test('objects in a stream', async () => {
  const answer = streamText({
    model, prompt: PERSON, temperature: 0, output: Output.object({ schema: PERSON_SHAPE }),
  });
  const partial = [];
  for await (const object of answer.partialOutputStream) partial.push(object);
  assert.deepEqual(partial.at(-1), { name: 'Rosa', price: 27 });
});
