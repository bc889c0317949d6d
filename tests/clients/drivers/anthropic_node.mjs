// The @anthropic-ai/sdk package for Node, as it comes.
import Anthropic from "@anthropic-ai/sdk";
import { BUSY_KEY, KEY, MODEL, URL_, asked, run } from "./proof.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: asked.question }];
const ASK = { model: MODEL, messages, max_tokens: asked.tokens };
const TOOL = { name: "weather", description: "Weather.", input_schema: asked.weather };
const form = (schema) => ({ format: { type: "json_schema", schema } });
const called = (message) => message.content.filter((block) => block.type === "tool_use").map((block) => block.input);
const usageOf = (usage) => ({
  prompt_tokens: usage.input_tokens + (usage.cache_read_input_tokens ?? 0),
  completion_tokens: usage.output_tokens,
});

async function begun(by, schema) {
  const stream = await by.messages.create({ ...ASK, max_tokens: 6000, output_config: form(schema), stream: true });
  const events = stream[Symbol.asyncIterator]();
  for (;;) {
    const { done, value } = await events.next();
    if (done) throw new Error("the stream was empty");
    if (value.type === "content_block_delta") return stream;
  }
}

await run({
  async plain() {
    const { data, request_id } = await client.messages.create(ASK).withResponse();
    return { text: data.content[0].text, usage: usageOf(data.usage), id: request_id };
  },
  async stream() {
    const texts = [];
    const stream = client.messages.stream(ASK).on("text", (text) => texts.push(text));
    const last = await stream.finalMessage();
    return { text: texts.join(""), pieces: texts.length, usage: usageOf(last.usage) };
  },
  async tools() {
    const user = { role: "user", content: asked.asked };
    const ask = { model: MODEL, max_tokens: 200, tools: [TOOL] };
    const first = await client.messages.create({ ...ask, messages: [user], tool_choice: { type: "tool", name: "weather" } });
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: asked.results[0] };
    const last = await client.messages.create({
      ...ask,
      max_tokens: asked.tokens,
      tool_choice: { type: "none" },
      messages: [user, { role: "assistant", content: first.content }, { role: "user", content: [result] }],
    });
    return { calls: called(first), reason: first.stop_reason, text: last.content[0].text };
  },
  async parallel() {
    const calls = ["Oslo", "Lima"].map((city, at) => ({ type: "tool_use", id: `call_${at}`, name: "weather", input: { city } }));
    const results = asked.results.map((content, at) => ({ type: "tool_result", tool_use_id: `call_${at}`, content }));
    const ask = {
      model: MODEL,
      max_tokens: 200,
      tools: [TOOL],
      messages: [
        { role: "user", content: asked.asked },
        { role: "assistant", content: calls },
        { role: "user", content: results },
        { role: "assistant", content: asked.said },
        { role: "user", content: asked.asked },
      ],
    };
    const whole = await client.messages.create({ ...ask, tool_choice: { type: "any" } });
    const streamed = await client.messages.stream({ ...ask, tool_choice: { type: "any" } }).finalMessage();
    const one = await client.messages.create({ ...ask, tool_choice: { type: "any", disable_parallel_tool_use: true } });
    return { calls: called(whole), streamed: called(streamed), one: called(one).length };
  },
  async json_schema() {
    const answer = await client.messages.create({ ...ASK, max_tokens: 200, output_config: form(asked.city) });
    return { value: JSON.parse(answer.content[0].text) };
  },
  async retry() {
    const busy = new Anthropic({ baseURL: URL_, apiKey: BUSY_KEY, maxRetries: 20 });
    const stream = await begun(busy, asked.long);
    const answer = await busy.messages.create(ASK);
    stream.controller.abort();
    return { text: answer.content[0].text };
  },
  async errors() {
    const found = {};
    for (const [name, more] of [["model", { model: "none" }], ["value", { max_tokens: 0 }]]) {
      try {
        await client.messages.create({ ...ASK, ...more });
      } catch (error) {
        found[name] = [error.constructor.name, error.error.error.type, Boolean(error.requestID)];
      }
    }
    return { found };
  },
  async count() {
    return { tokens: (await client.messages.countTokens({ model: MODEL, messages })).input_tokens };
  },
  async cancel() {
    (await begun(client, asked.longest)).controller.abort();
    return {};
  },
});
