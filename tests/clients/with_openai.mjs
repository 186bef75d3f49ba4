// The npm package `openai`.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import {
  ADD, BASE_URL, FACT, FACT_ANSWER, KEY, MODEL, PERSON, SUM, SUM_ANSWER, user,
} from './common.mjs';

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY });
const CHAT = { model: MODEL, temperature: 0 };
const PARAMETERS = {
  type: 'object',
  properties: { a: { type: 'integer' }, b: { type: 'integer' } },
  required: ['a', 'b'],
};
const ADD_NUMBERS = { name: 'add', description: 'Add two numbers.', parameters: PARAMETERS };

test('models', async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, [MODEL]);
});

test('chat', async () => {
  const answer = await client.chat.completions.create({ ...CHAT, messages: user(SUM) });
  assert.equal(answer.choices[0].message.content, SUM_ANSWER);
  assert.ok(answer.usage.completion_tokens > 0);
});

test('a stream', async () => {
  const stream = await client.chat.completions.create({
    ...CHAT, messages: user(FACT), stream: true, stream_options: { include_usage: true },
  });
  let text = '';
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? '';
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, FACT_ANSWER);
  assert.ok(usage.completion_tokens > 0);
});

test('a stream that is left', async () => {
  const stream = await client.chat.completions.create({ ...CHAT, messages: user(FACT), stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
});

test('completions', async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: 'Once upon a time', max_tokens: 8 });
  assert.ok(answer.choices[0].text);
});

test('tools with the runner', async () => {
  const runner = client.chat.completions.runTools({
    ...CHAT,
    messages: user(ADD),
    tools: [{
      type: 'function',
      function: { ...ADD_NUMBERS, parse: JSON.parse, function: ({ a, b }) => String(a + b) },
    }],
  });
  assert.equal(await runner.finalContent(), 'The result is 579.');
});

test('tools with the runner in a stream', async () => {
  const runner = client.chat.completions.runTools({
    ...CHAT,
    stream: true,
    messages: user(ADD),
    tools: [{
      type: 'function',
      function: { ...ADD_NUMBERS, parse: JSON.parse, function: ({ a, b }) => String(a + b) },
    }],
  });
  assert.equal(await runner.finalContent(), 'The result is 579.');
});

test('parse', async () => {
  const shape = z.object({ name: z.string(), price: z.number().int() });
  const answer = await client.chat.completions.parse({
    ...CHAT, messages: user(PERSON), response_format: zodResponseFormat(shape, 'person'),
  });
  assert.deepEqual(answer.choices[0].message.parsed, { name: 'Rosa', price: 27 });
});

test('responses', async () => {
  const answer = await client.responses.create({ ...CHAT, input: SUM });
  assert.equal(answer.output_text, SUM_ANSWER);
  const stream = client.responses.stream({ ...CHAT, input: FACT });
  let text = '';
  stream.on('response.output_text.delta', (event) => { text += event.delta; });
  assert.equal((await stream.finalResponse()).output_text, FACT_ANSWER);
  assert.equal(text, FACT_ANSWER);
});

test('errors', async () => {
  await assert.rejects(
    client.chat.completions.create({ ...CHAT, model: 'other', messages: user(SUM) }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === 'model_not_found',
  );
});
