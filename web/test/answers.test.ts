import assert from "node:assert/strict";
import { test } from "node:test";
import { answer, AnswerLost, type AnswerEvent, type Ask } from "../src/api/answers";
import { Refused, Unreachable } from "../src/api/client";
import { refused, said, streamed, Wire } from "./wire";

const CHAT = /^\/v1\/chat\/completions/;
const ASK: Ask = { model: "m", session: "s", messages: [], max_tokens: 8, profile: false };
const HALF = { id: "a1", choices: [{ delta: { content: "We" } }] };
const GOODBYE = { error: { message: "The server is shutting down.", code: "overloaded" } };

async function read(): Promise<{ events: AnswerEvent[]; text: string; error: unknown }> {
  const events: AnswerEvent[] = [];
  let error: unknown = null;
  try {
    for await (const event of answer(ASK, new AbortController().signal)) events.push(event);
  } catch (thrown) {
    error = thrown;
  }
  return { events, error, text: events.map((each) => (each.kind === "text" ? each.text : "")).join("") };
}

test("a server that never begins to answer is given up", async () => {
  const wire = new Wire();
  wire.on("POST", CHAT, Wire.silent);
  assert.ok((await read()).error instanceof Unreachable);
});

test("a stream is taken up where it ended", async () => {
  const wire = new Wire();
  wire.on("POST", CHAT, () => streamed([HALF]));
  wire.on("GET", CHAT, () => streamed(said("a1", "ll."), 1));
  const { text, error } = await read();
  assert.equal(error, null);
  assert.equal(text, "Well.");
  assert.match(wire.of("GET", CHAT)[0]!.path, /starting_after=0$/);
});

test("streams that end at once are tried less and less often, and then given up", async () => {
  const wire = new Wire();
  wire.on("POST", CHAT, () => streamed([HALF]));
  wire.on("GET", CHAT, () => new Response(""));
  const start = performance.now();
  const { error } = await read();
  assert.ok(error instanceof Refused && error.code === "answer_broken");
  assert.ok(wire.of("GET", CHAT).length < 10);
  assert.ok(performance.now() - start > 100); // seconds, in the page's time
});

test("an event that can't be read isn't skipped, and given up in the end", async () => {
  const wire = new Wire();
  wire.on("POST", CHAT, () => streamed([HALF, "{not JSON"]));
  wire.on("GET", CHAT, () => streamed(["{not JSON"], 1));
  const broken = await read();
  assert.ok(broken.error instanceof Refused && broken.error.code === "answer_broken");
  assert.ok(wire.of("GET", CHAT).every((each) => each.path.endsWith("starting_after=0")));
  assert.ok(wire.of("GET", CHAT).length < 10);
  wire.on("GET", CHAT, () => streamed(said("a1", "ll."), 1));
  assert.equal((await read()).text, "Well.");
});

test("a server that says goodbye and comes back is waited for", async () => {
  const wire = new Wire();
  wire.on("POST", CHAT, () => streamed([HALF, GOODBYE]));
  const replies = [
    () => Promise.reject(new TypeError("refused")),
    () => refused(503, "overloaded", "The server is starting or stopping."),
    () => new Response("<html>Bad Gateway</html>", { status: 502 }), // a proxy before it
    () => refused(404, "not_found"),
  ];
  wire.on("GET", CHAT, () => replies.shift()!());
  const { events, error } = await read();
  assert.ok(error instanceof AnswerLost);
  assert.ok(events.some((each) => each.kind === "reconnecting"));
  assert.equal(replies.length, 0);
});

test("a server that is there and says no once more is believed", async () => {
  const wire = new Wire();
  wire.on("POST", CHAT, () => streamed([HALF, GOODBYE]));
  wire.on("GET", CHAT, () => refused(503, "overloaded", GOODBYE.error.message));
  const { error } = await read();
  assert.ok(error instanceof Refused && error.code === "overloaded");
  assert.equal(wire.of("GET", CHAT).length, 1);
});
