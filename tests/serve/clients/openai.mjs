// The public JavaScript client against a server: node openai.mjs URL. Ends with 0 where all holds.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const ask = {
  model: "tale",
  messages: [{ role: "user", content: "Tell me of Mira." }],
  temperature: 0,
  max_tokens: 12,
};

assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["tale"]);

const whole = await client.chat.completions.create(ask);
const text = whole.choices[0].message.content;
assert.equal(whole.usage.completion_tokens, 12);

let joined = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...ask,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  joined += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(joined, text);
assert.equal(usage.completion_tokens, 12);

const helper = client.chat.completions.stream(ask);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);

const left = await client.chat.completions.create({ ...ask, max_tokens: 400, stream: true });
for await (const _ of left) break; // leaves in mid-stream

const response = await client.responses.create({
  model: "tale",
  input: "Tell me of Mira.",
  temperature: 0,
  max_output_tokens: 12,
});
assert.equal(response.output_text, text);

const schema = {
  type: "object",
  properties: { awake: { type: "boolean" } },
  required: ["awake"],
  additionalProperties: false,
};
const form = { type: "json_schema", json_schema: { name: "state", strict: true, schema } };
const typed = await client.chat.completions.create({ ...ask, response_format: form });
assert.equal(typeof JSON.parse(typed.choices[0].message.content).awake, "boolean");

const vectors = await client.embeddings.create({ model: "tale", input: ["a baker", "a dog"] });
assert.equal(vectors.data.length, 2);
assert.ok(vectors.data[0].embedding.length > 8);

await assert.rejects(client.chat.completions.create({ ...ask, model: "nobody" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), OpenAI.BadRequestError);
console.log("ok");
