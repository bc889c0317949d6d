import assert from "node:assert/strict";
import { test } from "node:test";
import type { Session } from "../src/api/types";
import { familiesOf, originOf, versionsAfter } from "../src/state/conversations";
import { beginning, messagesFor, NEWEST, STRIDE } from "../src/state/history";
import { keptEntry } from "../src/state/entry";
import { addressOf, parseRoute } from "../src/state/route";

let clock = 0;
const session = (id: string, turns: number, parent: [string, number] | null = null): Session => ({
  id,
  title: id,
  turns,
  created_at: ++clock,
  updated_at: clock,
  parent: parent && { session: parent[0], turn: parent[1] },
});

const a = session("a", 6);
const b = session("b", 4, ["a", 2]); // the second question edited
const c = session("c", 6, ["a", 2]); // and again
const d = session("d", 6, ["c", 4]); // the third question of c asked anew
const alone = session("alone", 2);
const ALL = [a, b, c, d, alone];

test("a turn belongs to the conversation in which it was said first", () => {
  assert.equal(originOf(ALL, d, 5).id, "d");
  assert.equal(originOf(ALL, d, 4).id, "c");
  assert.equal(originOf(ALL, d, 2).id, "a");
  assert.equal(originOf(ALL, a, 2).id, "a");
});

test("versions are what follows the same beginning", () => {
  const second = versionsAfter(ALL, b, 2);
  assert.deepEqual(second?.all.map((each) => each.id), ["a", "b", "c"]);
  assert.equal(second?.current, 1);
  assert.equal(versionsAfter(ALL, d, 2)?.current, 2); // d goes by way of c
  assert.equal(versionsAfter(ALL, a, 2)?.current, 0);
  const third = versionsAfter(ALL, d, 4);
  assert.deepEqual(third?.all.map((each) => each.id), ["c", "d"]);
  assert.equal(third?.current, 1);
  assert.equal(versionsAfter(ALL, a, 4), null);
  assert.equal(versionsAfter(ALL, alone, 0), null);
});

test("a branch of a deleted conversation stands alone", () => {
  assert.equal(versionsAfter([b], b, 2), null);
  assert.equal(originOf([b], b, 1).id, "b");
  assert.equal(familiesOf([b]).length, 1);
});

test("branches are one family", () => {
  const families = familiesOf(ALL);
  assert.deepEqual(families.map((each) => each.root.id), ["alone", "a"]);
  assert.deepEqual(families[1]?.members.map((each) => each.id), ["d", "c", "b", "a"]);
});

test("parents in a circle don't hang the page", () => {
  const x = session("x", 2, ["y", 1]);
  const y = session("y", 2, ["x", 1]);
  assert.equal(familiesOf([x, y]).length > 0, true);
  versionsAfter([x, y], x, 1);
});

test("the sent history moves in strides and begins with a question", () => {
  const short = (n: number) => Array.from({ length: n }, () => 10);
  assert.equal(beginning(short(NEWEST)), 0);
  assert.equal(beginning(short(NEWEST + 2)), STRIDE);
  assert.equal(beginning(short(NEWEST + STRIDE)), STRIDE);
  for (let n = 0; n < 200; n += 2) assert.equal(beginning(short(n)) % 2, 0);
  assert.equal(beginning([50_000, 10, 10, 10]), 2);
});

test("a document is sent where it was first asked about, also when that turn is left out", () => {
  const said = Array.from({ length: NEWEST + 4 }, (_, index) =>
    keptEntry({ session: "s", turn: index + 1, speaker: index % 2 ? "assistant" : "user", at: 0, text: `t${index}`, files: index === 0 ? ["f"] : [] }),
  );
  const messages = messagesFor(said, "now", ["f", "g"]);
  assert.equal(messages.length, said.length - STRIDE + 1);
  assert.deepEqual(messages[0]?.content, [{ type: "file", file: { file_id: "f" } }, { type: "text", text: `t${STRIDE}` }]);
  assert.deepEqual(messages.at(-1)?.content, [{ type: "file", file: { file_id: "g" } }, { type: "text", text: "now" }]);
});

test("addresses lead back", () => {
  for (const route of [
    { view: "chat", session: null, turn: null },
    { view: "chat", session: "月/1 %", turn: 12 },
    { view: "memory" },
  ] as const) assert.deepEqual(parseRoute(addressOf(route)), route);
  assert.deepEqual(parseRoute("#/c/%E0%A4%A"), { view: "chat", session: null, turn: null });
});
