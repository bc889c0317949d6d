// What both Node drivers share, as proof.py does for Python's.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const { PERILUNE_URL, PERILUNE_MODEL, PERILUNE_KEY, PERILUNE_BUSY_KEY } = process.env;
export { PERILUNE_URL as URL_, PERILUNE_MODEL as MODEL, PERILUNE_KEY as KEY, PERILUNE_BUSY_KEY as BUSY_KEY };
export const asked = JSON.parse(readFileSync(new URL("./questions.json", import.meta.url)));

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

async function wait() {
  console.log("waiting");
  await lines.next();
}

// What the programs print that docs/clients.md shows for this client. They lie where its packages are.
async function page() {
  const said = [];
  const log = console.log;
  for (const path of JSON.parse(process.env.PERILUNE_PAGE)) {
    const printed = [];
    console.log = (...words) => printed.push(words.join(" "));
    await import(path).finally(() => (console.log = log));
    said.push(printed.join("\n"));
  }
  return { said };
}

// `page`, then every proof in this order. The last is `cancel`; the test lets it begin, and lets the program end.
export async function run(proofs) {
  for (const [name, prove] of Object.entries({ page, ...proofs })) {
    if (name === "cancel") await wait();
    const start = performance.now();
    let facts;
    try {
      facts = await prove();
    } catch (error) {
      facts = { fault: String(error.stack ?? error) };
    }
    console.log(JSON.stringify({ proof: name, ...facts, spent_s: (performance.now() - start) / 1000 }));
  }
  await wait();
  process.exit(0);
}
