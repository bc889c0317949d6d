import assert from "node:assert/strict";
import { test } from "node:test";
import en from "../src/text/en.json";
import zh from "../src/text/zh.json";
import { count, language, seconds, t } from "../src/text";

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
