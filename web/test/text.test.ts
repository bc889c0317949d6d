import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import path from "node:path";
import { test } from "node:test";
import en from "../src/text/en.json";
import zh from "../src/text/zh.json";
import { Refused, Unreachable } from "../src/api/client";
import { count, hasText, inWords, language, named, seconds, t } from "../src/text";
import { lineOf } from "../src/text/failures";

const places = (text: string) => (text.match(/\{\w+\}/g) ?? []).sort().join();

test("both languages have the same texts with the same places", () => {
  assert.deepEqual(Object.keys(zh).sort(), Object.keys(en).sort());
  for (const key of Object.keys(en) as (keyof typeof en)[]) {
    assert.equal(places(zh[key]), places(en[key]), key);
    assert.notEqual(zh[key].trim(), "", key);
    assert.notEqual(en[key].trim(), "", key);
  }
});

test("Chinese texts are Chinese", () => {
  const same = (Object.keys(en) as (keyof typeof en)[]).filter((key) => /[a-z]{4}/i.test(en[key]) && zh[key] === en[key]);
  assert.deepEqual(same, []);
});

test("texts follow the language", () => {
  language.value = "en";
  assert.equal(t("file.reading", { n: 3, total: 9 }), "Reading page 3 of 9");
  assert.equal(seconds(3.74), "3.7 s");
  assert.equal(seconds(125), "2 min");
  assert.equal(seconds(0.01), "under 0.1 s");
  assert.equal(count(1234567), "1,234,567");
  language.value = "zh";
  assert.equal(t("stop"), "停止");
  language.value = "en";
});

/** The codes in the first column of the table below a heading of a page in docs/. */
function codesIn(page: string, heading: string, column: number): string[] {
  const text = readFileSync(path.join(process.cwd(), "../docs", page), "utf8");
  const section = text.slice(text.indexOf(`\n## ${heading}\n`) + 1).split("\n## ")[0]!;
  const cells = section.split("\n").filter((line) => line.startsWith("| ")).slice(1).map((line) => line.split("|")[column]!);
  return cells.flatMap((cell) => [...cell.matchAll(/`([a-z_]+)`/g)].map((found) => found[1]!));
}

test("every code that the server documents has a text", () => {
  const errors = codesIn("api.md", "Errors", 2);
  const degradations = codesIn("perilune-object.md", "Degradations", 1);
  assert.ok(errors.includes("overloaded") && degradations.includes("refined"));
  const unreadable = /`perilune.error_code` is ([^.]*)/.exec(readFileSync("../docs/api.md", "utf8"))![1]!.match(/[a-z_]+(?=`)/g)!;
  assert.ok(unreadable.includes("locked"));
  for (const code of unreadable) assert.ok(hasText(`unreadable.${code}`), code);
  for (const code of errors) assert.ok(hasText(`error.${code}`), code);
  for (const code of degradations) assert.ok(hasText(`degraded.${code}`), code);
});

test("what the server says is shown in the reader's language by its code", () => {
  const known = new Refused(413, "too_large", "It has 5 GB.");
  const unknown = new Refused(400, "of_tomorrow", "It is too new.");
  assert.equal(lineOf(known), "It has 5 GB.");
  language.value = "zh";
  assert.equal(lineOf(known), zh["error.too_large"]);
  assert.equal(lineOf(unknown), "It is too new.");
  assert.equal(lineOf(new Unreachable("")), zh["error.offline"]);
  assert.equal(inWords("machine.check.disk.warning", "Disk: 3 GB"), zh["machine.check.disk.warning"]);
  assert.equal(inWords("machine.check.tape.warning", "Tape: torn"), "Tape: torn");
  language.value = "en";
});

test("codes have names, and one of tomorrow stands for itself", () => {
  language.value = "zh";
  assert.equal(named("outcome", "timed_out"), zh["outcome.timed_out"]);
  assert.equal(named("taken", "email"), zh["taken.email"]);
  assert.equal(named("fact", "residence"), zh["fact.residence"]);
  assert.equal(named("taken", "of_tomorrow"), "of_tomorrow");
  language.value = "en";
});
