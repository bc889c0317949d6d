import assert from "node:assert/strict";
import { test } from "node:test";
import { toldBy } from "../src/api/answers";
import { Refused } from "../src/api/client";
import { EventParser, type StreamEvent } from "../src/api/eventStream";

const bytes = (text: string) => new TextEncoder().encode(text);

test("events are read whatever pieces they come in", () => {
  const wire = ': keep-alive\n\nid: 0\ndata: {"a": "月"}\n\nid: 1\r\ndata: one\r\ndata: two\r\n\r\ndata: [DONE]\n\n';
  const expected: StreamEvent[] = ["comment", { id: 0, data: '{"a": "月"}' }, { id: 1, data: "one\ntwo" }, { id: 1, data: "[DONE]" }];
  const all = bytes(wire);
  for (const size of [1, 2, 5, 1000]) {
    const parser = new EventParser();
    const found: StreamEvent[] = [];
    for (let at = 0; at < all.length; at += size) found.push(...parser.push(all.slice(at, at + size)));
    assert.deepEqual(found, expected, `pieces of ${size}`);
  }
});

const told = (chunk: unknown) => toldBy({ id: 1, data: JSON.stringify(chunk) });

test("chunks become what the page knows", () => {
  assert.deepEqual(told({ id: "c", choices: [{ delta: { content: "hi" } }] }), [{ kind: "opened", id: "c" }, { kind: "text", text: "hi" }]);
  assert.deepEqual(told({ choices: [], perilune: { stage: "prefilling" } }), [{ kind: "stage", stage: "prefilling" }]);
  assert.deepEqual(told({ choices: [{ delta: { reasoning_content: "hm", reasoning: "hm" } }] }), [{ kind: "thought", text: "hm" }]);
  const progress = { stage: "prefilling", processed: 5, total: 9, eta_s: 1.5 };
  assert.deepEqual(told({ choices: [], perilune: progress }), [{ kind: "prefilling", processed: 5, total: 9, eta_s: 1.5 }]);
  const report = { plan: "full" };
  assert.deepEqual(told({ choices: [{ delta: {}, finish_reason: "stop" }], perilune: report }), [{ kind: "finished", reason: "stop", report }]);
  assert.deepEqual(told({ choices: [], perilune: { stage: "something of tomorrow" } }), []);
});

test("an error in the stream is thrown", () => {
  assert.throws(() => told({ error: { message: "Broken.", code: "answer_broken" } }), (error) => error instanceof Refused && error.code === "answer_broken");
});
