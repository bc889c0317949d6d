import assert from "node:assert/strict";
import { test } from "node:test";
import { newThread } from "../src/state/threads";
import { models } from "../src/state/models";
import { ok, said, streamed, until, Wire } from "./wire";

const MODELS = { data: [{ id: "first", max_model_len: 8 }, { id: "second", max_model_len: 8 }] };
const CHAT = /^\/v1\/chat\/completions/;

let made = 0;
const newSession = () => `s${made++}`;

/** A server that keeps nothing and answers everything. */
function willing(): Wire {
  const wire = new Wire();
  models.value = [];
  wire.on("GET", /^\/v1\/models/, () => ok(MODELS));
  wire.on("GET", /^\/v1\/sessions/, () => new Response("{}", { status: 404 }));
  wire.on("POST", CHAT, () => streamed(said("a1", "Well.")));
  return wire;
}

test("a question waits until it is known which models there are", async () => {
  const wire = willing();
  let arrive = (_: Response) => {};
  wire.on("GET", /^\/v1\/models/, () => new Promise<Response>((resolve) => (arrive = resolve)));
  const thread = newThread(newSession());
  thread.ask({ text: "Early?", files: [] });
  await new Promise((resolve) => setTimeout(resolve, 30));
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.equal(thread.answering.value, true); // and the page shows that it waits
  arrive(ok(MODELS));
  await until(() => !thread.answering.value);
  assert.equal((wire.of("POST", CHAT)[0]?.body as { model: string }).model, "first");
  assert.equal(thread.entries.value.at(-1)?.text.value, "Well.");
});

test("a question that can't learn the models fails, and can be asked again", async () => {
  const wire = willing();
  wire.on("GET", /^\/v1\/models/, () => Promise.reject(new TypeError("no network")));
  const thread = newThread(newSession());
  thread.ask({ text: "Anyone?", files: [] });
  await until(() => !thread.answering.value);
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.ok(thread.entries.value.at(-1)?.failure.value);
  wire.on("GET", /^\/v1\/models/, () => ok(MODELS));
  thread.askInPlaceOf(thread.entries.value[0]!, { text: "Anyone?", files: [] });
  await until(() => !thread.answering.value);
  assert.equal(thread.entries.value.at(-1)?.text.value, "Well.");
});
