import assert from "node:assert/strict";
import { test } from "node:test";
import { Refused, Unreachable } from "../src/api/client";
import { ask } from "../src/state/actions";
import { draftOf } from "../src/state/drafts";
import { models } from "../src/state/models";
import { notePending, pendingOf } from "../src/state/pending";
import { isOpen, openConversation } from "../src/state/route";
import { deleteConversation, newThread, threadOf } from "../src/state/threads";
import type { Thread } from "../src/state/thread";
import { moment, ok, refused, said, streamed, until, Wire } from "./wire";

const MODELS = { data: [{ id: "first", max_model_len: 8 }, { id: "second", max_model_len: 8 }] };
const CHAT = /^\/v1\/chat\/completions/;
const SESSION = /^\/v1\/sessions/;
const MOON = { text: "Where is the moon?", files: [] };

let made = 0;
const newSession = () => `s${made++}`;

/** A server that answers everything, and keeps `turns` of every conversation; null: it knows of none. */
function willing(turns: [speaker: string, text: string][] | null = null): Wire {
  const wire = new Wire();
  models.value = [];
  wire.on("GET", /^\/v1\/models/, () => ok(MODELS));
  wire.on("GET", /^\/v1\/feedback/, () => ok({ data: [] }));
  wire.on("GET", SESSION, ({ path }) => {
    if (turns === null) return refused(404, "not_found");
    const after = Number(/after=(\d+)/.exec(path)?.[1]);
    const data = turns.map(([speaker, text], index) => ({ turn: index + 1, speaker, text, at: 0 })).slice(after);
    return ok({ id: /sessions\/(\w+)/.exec(path)?.[1], title: "", turns: turns.length, created_at: 0, updated_at: 0, parent: null, data, has_more: false });
  });
  wire.on("POST", CHAT, () => streamed(said("a1", "Well.")));
  return wire;
}

async function answered(thread: Thread): Promise<void> {
  await until(() => !thread.answering.value);
}

const encoded = (event: unknown) => new TextEncoder().encode(`data: ${JSON.stringify(event)}\n\n`);
const last = (thread: Thread) => thread.entries.value.at(-1)!;

test("a question waits until it is known which models there are", async () => {
  const wire = willing();
  let arrive = (_: Response) => {};
  wire.on("GET", /^\/v1\/models/, () => new Promise<Response>((resolve) => (arrive = resolve)));
  const thread = newThread(newSession());
  thread.ask(MOON);
  await moment(30);
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.equal(thread.answering.value, true); // and the page shows that it waits
  arrive(ok(MODELS));
  await answered(thread);
  assert.equal((wire.of("POST", CHAT)[0]?.body as { model: string }).model, "first");
  assert.equal(last(thread).text.value, "Well.");
});

test("a question that can't learn the models fails, and can be asked again", async () => {
  const wire = willing();
  wire.on("GET", /^\/v1\/models/, () => Promise.reject(new TypeError("no network")));
  const thread = newThread(newSession());
  thread.ask(MOON);
  await answered(thread);
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.ok(last(thread).failure.value instanceof Unreachable);
  wire.on("GET", /^\/v1\/models/, () => ok(MODELS));
  thread.askInPlaceOf(thread.entries.value[0]!, MOON);
  await answered(thread);
  assert.equal(last(thread).text.value, "Well.");
  assert.equal(thread.entries.value.length, 2);
});

test("a question that waits for something is stopped at once", async () => {
  const wire = willing();
  wire.on("GET", /^\/v1\/models/, Wire.silent);
  const thread = newThread(newSession());
  thread.ask(MOON);
  await thread.stop();
  await answered(thread);
  assert.equal(last(thread).finish.value, "cancelled");
});

test("a question that is asked while the conversation is read is kept, and asked behind what was said", async () => {
  const wire = willing([["user", "Hello?"], ["assistant", "Hello."]]);
  const thread = threadOf(newSession());
  assert.equal(thread.state.value.is, "loading");
  thread.ask(MOON);
  assert.equal(thread.entries.value[0]?.text.value, MOON.text);
  await answered(thread);
  assert.deepEqual(thread.entries.value.map((each) => each.text.value), ["Hello?", "Hello.", MOON.text, "Well."]);
  const { messages } = wire.of("POST", CHAT)[0]?.body as { messages: unknown[] };
  assert.equal(messages.length, 3);
});

test("a question that is asked where the conversation couldn't be read is kept, and asked when it can", async () => {
  const wire = willing([["user", "Hello?"], ["assistant", "Hello."]]);
  wire.on("GET", SESSION, () => refused(500, "internal_error"));
  const thread = threadOf(newSession());
  await until(() => thread.state.value.is === "failed");
  thread.ask(MOON);
  await answered(thread);
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.ok(last(thread).failure.value instanceof Refused);
  const turns = willing([["user", "Hello?"], ["assistant", "Hello."]]);
  thread.askInPlaceOf(thread.entries.value[0]!, MOON);
  await answered(thread);
  assert.equal(turns.of("POST", CHAT).length, 1);
  assert.deepEqual(thread.entries.value.map((each) => each.text.value), ["Hello?", "Hello.", MOON.text, "Well."]);
});

test("a question to a deleted conversation doesn't make it anew, and isn't lost", async () => {
  const wire = willing();
  const thread = threadOf(newSession());
  thread.ask(MOON);
  await answered(thread);
  assert.equal(thread.state.value.is, "missing");
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.equal(draftOf(null).text.value, MOON.text);
  draftOf(null).clear();
});

test("what was under way long ago isn't asked again by itself", async () => {
  const wire = willing();
  wire.on("GET", CHAT, () => refused(404, "not_found"));
  const session = newSession();
  notePending({ session, id: "a0", question: MOON.text, files: [] });
  const thread = threadOf(session);
  await until(() => thread.entries.value.length === 2 && !thread.answering.value);
  assert.equal(wire.of("POST", CHAT).length, 0);
  assert.equal(last(thread).torn.value, true); // the page offers to ask again
  assert.equal(pendingOf(session), undefined);
});

test("an answer that a restart took away is asked for once more, but only of who was there", async () => {
  const wire = willing([]);
  const answers = [streamed([{ id: "a1", choices: [{ delta: { content: "We" } }] }]), streamed(said("a2", "Well again."))];
  wire.on("POST", CHAT, () => answers.shift()!);
  wire.on("GET", CHAT, () => refused(404, "not_found"));
  const thread = newThread(newSession());
  thread.ask(MOON);
  await answered(thread);
  assert.equal(wire.of("POST", CHAT).length, 2);
  assert.equal(last(thread).text.value, "Well again.");
});

test("an answer that a restart cut off is asked for once more beside what is kept of it, and no third time", async () => {
  const wire = willing([]);
  const session = newSession();
  const turns = [
    { turn: 1, speaker: "user", text: MOON.text, at: 0 },
    { turn: 2, speaker: "assistant", text: "We", at: 0, answer: { id: "a1", finish_reason: "cancelled" } },
  ];
  const kept = { title: "", turns: 2, created_at: 0, updated_at: 0, parent: null, data: turns, has_more: false };
  wire.on("GET", SESSION, ({ path }) => ok({ ...kept, id: /sessions\/([\w-]+)/.exec(path)?.[1] }));
  wire.on("POST", CHAT, () => streamed([{ id: "a1", choices: [{ delta: { content: "We" } }] }]));
  wire.on("GET", CHAT, () => refused(404, "not_found"));
  wire.on("POST", SESSION, () => ok({ ...kept, id: "beside", turns: 0, parent: { session, turn: 0 } }));
  const thread = newThread(session);
  openConversation(session);
  ask(thread, MOON);
  await answered(thread);
  await until(() => isOpen("beside"));
  await answered(threadOf("beside"));
  await moment(30);
  const sessions = wire.of("POST", CHAT).map((each) => (each.body as { session: string }).session);
  assert.deepEqual(sessions, [session, "beside"]);
  assert.equal(last(thread).torn.value, true);
  assert.equal(last(thread).text.value, "We");
});

test("an answer that was lost with its conversation isn't asked for again", async () => {
  const wire = willing([["user", "Hello?"], ["assistant", "Hello."]]);
  const thread = threadOf(newSession());
  await until(() => thread.state.value.is === "ready");
  wire.on("POST", CHAT, () => streamed([{ id: "a1", choices: [{ delta: { content: "We" } }] }]));
  wire.on("GET", SESSION, () => refused(404, "not_found")); // somebody deleted it
  wire.on("GET", CHAT, () => refused(404, "not_found"));
  thread.ask(MOON);
  await answered(thread);
  assert.equal(wire.of("POST", CHAT).length, 1);
  assert.equal(thread.state.value.is, "missing");
  draftOf(null).clear();
});

test("deleting a conversation stops its answer and forgets what was under way", async () => {
  const wire = willing([]);
  wire.on("POST", CHAT, () => new Response(new ReadableStream({ start: (pipe) => pipe.enqueue(new TextEncoder().encode('data: {"id": "a1"}\n\n')) })));
  wire.on("DELETE", /./, () => ok({}));
  const session = newSession();
  const thread = newThread(session);
  thread.ask(MOON);
  await until(() => pendingOf(session) !== undefined);
  await deleteConversation(session);
  assert.deepEqual(wire.asked.filter((each) => each.method === "DELETE").map((each) => each.path), ["/v1/chat/completions/a1", `/v1/sessions/${session}`]);
  assert.equal(pendingOf(session), undefined);
});

test("a draft belongs to its conversation and outlives a reload", () => {
  willing();
  draftOf("x").text.value = "half a que";
  draftOf("x").attachKnown("f1", "same.pdf");
  draftOf("x").attachKnown("f2", "same.pdf");
  assert.equal(draftOf("y").text.value, "");
  assert.equal(draftOf(null).attachments.value.length, 0);
  const keys = draftOf("x").attachments.value.map((each) => each.key);
  assert.equal(new Set(keys).size, 2);
  assert.deepEqual(JSON.parse(sessionStorage.getItem("perilune.draft.x")!), {
    text: "half a que",
    files: [{ id: "f1", name: "same.pdf" }, { id: "f2", name: "same.pdf" }],
  });
});

test("an answer of a server that says nothing any more is stopped within seconds", async () => {
  const wire = willing([]);
  wire.on("POST", CHAT, (_, signal) => {
    const start = (stream: ReadableStreamDefaultController) => {
      stream.enqueue(encoded({ id: "a9", choices: [{ delta: { content: "Half" } }] }));
      signal?.addEventListener("abort", () => stream.error(signal.reason)); // as a browser does
    };
    return new Response(new ReadableStream({ start }));
  });
  wire.on("DELETE", CHAT, Wire.silent);
  const thread = newThread(newSession());
  thread.ask(MOON);
  await until(() => last(thread).live.value?.id.value === "a9");
  wire.on("GET", SESSION, Wire.silent);
  void thread.stop();
  await until(() => !thread.answering.value, 200); // ten seconds of the page's
  assert.equal(last(thread).finish.value, "cancelled");
  assert.equal(last(thread).text.value, "Half");
});

test("a model that the server has no more is looked for again with the next question", async () => {
  const wire = willing();
  wire.on("POST", CHAT, () => refused(404, "model_not_found"));
  const thread = newThread(newSession());
  thread.ask(MOON);
  await answered(thread);
  assert.ok(last(thread).failure.value instanceof Refused);
  wire.on("GET", /^\/v1\/models/, () => ok({ data: [{ id: "third", max_model_len: 8 }] }));
  wire.on("POST", CHAT, () => streamed(said("a1", "Well.")));
  thread.askInPlaceOf(thread.entries.value[0]!, MOON);
  await answered(thread);
  assert.equal((wire.of("POST", CHAT)[1]?.body as { model: string }).model, "third");
});
