import assert from "node:assert/strict";
import { test } from "node:test";
import { listFiles, newestFiles } from "../src/api/files";
import { ok, Wire } from "./wire";

test("all pages of the list of files are read", async () => {
  const wire = new Wire();
  const ids = ["a", "b", "c"];
  wire.on("GET", /^\/v1\/files/, ({ path }) => {
    const after = /after=(\w+)/.exec(path)?.[1];
    const at = after ? ids.indexOf(after) + 1 : 0;
    return ok({ data: [{ id: ids[at] }], has_more: at < 2, last_id: ids[at] });
  });
  assert.deepEqual((await listFiles()).map((each) => each.id), ids);
  assert.equal((await newestFiles(1)).length, 1);
});
