// The openai package for Node, as it comes.
import OpenAI from "openai";
import { BUSY_KEY, KEY, MODEL, URL_, asked, run } from "./proof.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: asked.question }];
const ASK = { model: MODEL, messages, max_tokens: asked.tokens, temperature: 0 };
const TOOL = { type: "function", function: { name: "weather", description: "Weather.", parameters: asked.weather } };
const form = (schema) => ({ type: "json_schema", json_schema: { name: "form", schema, strict: true } });
const called = (message) => message.tool_calls.map((call) => JSON.parse(call.function.arguments));

async function begun(by, schema) {
  const stream = await by.chat.completions.create({ model: MODEL, messages, response_format: form(schema), stream: true });
  const pieces = stream[Symbol.asyncIterator]();
  for (;;) {
    const { done, value } = await pieces.next();
    if (done) throw new Error("the stream was empty");
    if (value.choices[0]?.delta.content) return { stream, pieces };
  }
}

await run({
  async plain() {
    const { data, request_id } = await client.chat.completions.create(ASK).withResponse();
    return { text: data.choices[0].message.content, usage: data.usage, id: request_id };
  },
  async stream() {
    const texts = [];
    let usage = null;
    const more = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ ...ASK, ...more })) {
      if (chunk.choices[0]?.delta.content) texts.push(chunk.choices[0].delta.content);
      usage = chunk.usage ?? usage;
    }
    return { text: texts.join(""), pieces: texts.length, usage };
  },
  async tools() {
    const user = { role: "user", content: asked.asked };
    const choice = { type: "function", function: { name: "weather" } };
    const first = await client.chat.completions.create({
      model: MODEL, messages: [user], tools: [TOOL], tool_choice: choice, temperature: 0,
    });
    const message = first.choices[0].message;
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: asked.results[0] };
    const last = await client.chat.completions.create({
      ...ASK, messages: [user, message, result], tools: [TOOL], tool_choice: "none",
    });
    return { calls: called(message), reason: first.choices[0].finish_reason, text: last.choices[0].message.content };
  },
  async parallel() {
    const calls = ["Oslo", "Lima"].map((city, at) => ({
      id: `call_${at}`, type: "function", function: { name: "weather", arguments: JSON.stringify({ city }) },
    }));
    const ask = {
      model: MODEL,
      tools: [TOOL],
      tool_choice: "required",
      temperature: 0,
      messages: [
        { role: "user", content: asked.asked },
        { role: "assistant", content: null, tool_calls: calls },
        ...asked.results.map((content, at) => ({ role: "tool", tool_call_id: `call_${at}`, content })),
        { role: "assistant", content: asked.said },
        { role: "user", content: asked.asked },
      ],
    };
    const whole = await client.chat.completions.create(ask);
    const streamed = await client.chat.completions.stream(ask).finalChatCompletion();
    const one = await client.chat.completions.create({ ...ask, parallel_tool_calls: false });
    return {
      calls: called(whole.choices[0].message),
      streamed: called(streamed.choices[0].message),
      one: one.choices[0].message.tool_calls.length,
    };
  },
  async json_schema() {
    const answer = await client.chat.completions.create({ model: MODEL, messages, response_format: form(asked.city) });
    return { value: JSON.parse(answer.choices[0].message.content) };
  },
  async retry() {
    const busy = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: BUSY_KEY, maxRetries: 20 });
    const { stream } = await begun(busy, asked.long);
    const answer = await busy.chat.completions.create(ASK);
    stream.controller.abort();
    return { text: answer.choices[0].message.content };
  },
  async errors() {
    const found = {};
    for (const [name, more] of [["model", { model: "none" }], ["value", { temperature: 9 }]]) {
      try {
        await client.chat.completions.create({ ...ASK, ...more });
      } catch (error) {
        found[name] = [error.constructor.name, error.code, error.param];
      }
    }
    return { found };
  },
  async responses() {
    const ask = { model: MODEL, max_output_tokens: asked.tokens, temperature: 0 };
    const first = await client.responses.create({ ...ask, input: asked.question });
    const stream = client.responses.stream({ ...ask, input: "And the moon?", previous_response_id: first.id });
    const last = await stream.finalResponse();
    const kept = await client.responses.retrieve(last.id);
    await client.responses.delete(last.id);
    return { text: first.output_text, same: kept.output_text === last.output_text };
  },
  async files() {
    const file = await OpenAI.toFile(Buffer.from("The rent is 940 crowns a month."), "notes.txt");
    const made = await client.files.create({ file, purpose: "user_data" });
    const done = await client.files.waitForProcessing(made.id, { pollInterval: 200 });
    const listed = [];
    for await (const each of client.files.list()) listed.push(each.id);
    const content = await (await client.files.content(made.id)).text();
    const gone = (await client.files.delete(made.id)).deleted;
    return { status: done.status, listed: listed.includes(made.id), content, gone };
  },
  async batches() {
    const url = "/v1/chat/completions";
    const line = (n) => ({ custom_id: `l${n}`, method: "POST", url, body: { ...ASK, max_tokens: 2 - 4 * n } });
    const data = [0, 1].map((n) => JSON.stringify(line(n))).join("\n");
    const file = await client.files.create({ file: await OpenAI.toFile(Buffer.from(data), "in.jsonl"), purpose: "batch" });
    const made = await client.batches.create({ input_file_id: file.id, endpoint: url, completion_window: "24h" });
    let batch = made;
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      await new Promise((done) => setTimeout(done, 200));
      batch = await client.batches.retrieve(made.id);
    }
    const read = async (id) => JSON.parse(await (await client.files.content(id)).text());
    const [done, failed] = [await read(batch.output_file_id), await read(batch.error_file_id)];
    const listed = [];
    for await (const each of client.batches.list()) listed.push(each.id);
    const late = await client.batches.cancel(made.id).then(() => false, (error) => error instanceof OpenAI.ConflictError);
    return {
      status: batch.status,
      counts: batch.request_counts,
      ids: [done.custom_id, failed.custom_id],
      text: done.response.body.choices[0].message.content,
      refused: failed.response.status_code,
      listed: listed.includes(made.id),
      late,
    };
  },
  async cancel() {
    const { stream } = await begun(client, asked.longest);
    stream.controller.abort();
    return {};
  },
});
