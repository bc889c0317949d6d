import assert from "node:assert/strict";
import { test } from "node:test";
import { askForKey, json, key, keyWanted, Refused } from "../src/api/client";
import { documentOf } from "../src/state/documents";
import { moment, ok, refused, until, Wire } from "./wire";

/** A server that wants the key "right". */
function guarded(): Wire {
  const wire = new Wire();
  key.value = null;
  const fetch = globalThis.fetch;
  globalThis.fetch = ((path: string, init: { headers: Record<string, string> }) =>
    init.headers["authorization"] === "Bearer right" ? fetch(path, init) : Promise.resolve(refused(401, "invalid_api_key"))) as typeof globalThis.fetch;
  wire.on("GET", /./, () => ok({ data: [] }));
  return wire;
}

test("a key is asked for once, whoever waits for it, and again when it is wrong", async () => {
  guarded();
  const calls = Promise.all([json("/v1/models"), json("/v1/sessions")]);
  await until(() => keyWanted.value !== null);
  assert.equal(keyWanted.value!.wrong, false);
  keyWanted.value!.answer("wrong");
  await until(() => keyWanted.value?.wrong === true);
  keyWanted.value!.answer("right");
  await calls;
  assert.equal(keyWanted.value, null);
});

test("who won't give a key isn't asked again and again", async () => {
  guarded();
  const call = json("/v1/models");
  await until(() => keyWanted.value !== null);
  keyWanted.value!.answer(null);
  await assert.rejects(call, (error) => error instanceof Refused && error.status === 401);
  documentOf("f1"); // what the page looks after by itself
  await assert.rejects(json("/v1/sessions"));
  await moment(100);
  assert.equal(keyWanted.value, null);
  const asked = askForKey(); // a button that they press
  keyWanted.value!.answer("right");
  assert.equal(await asked, "right");
  await json("/v1/models");
});
