import assert from "node:assert/strict";
import { test } from "node:test";
import { answeringSentence, excerptOf, sentencesOf } from "../src/conversation/excerpt";
import { piecesOf, pointAt, quoteIn, unitAt } from "../src/panel/marked";
import { snippetOf } from "../src/sidebar/SearchResults";

test("a mark counts code points, also behind characters outside the first plane", () => {
  const text = "𝒜𝒷 the quote. 😀 end";
  assert.equal(unitAt(text, 2), 4);
  assert.equal(pointAt(text, 4), 2);
  const points = Array.from(text);
  const start = points.join("").indexOf("the") - 2; // two characters take two units
  assert.deepEqual(piecesOf(text, 100, { start: 100 + start, end: 100 + start + 9 }), { before: "𝒜𝒷 ", marked: "the quote", after: ". 😀 end" });
});

test("a mark that began on the page before marks what is here", () => {
  assert.deepEqual(piecesOf("abcdef", 10, { start: 5, end: 12 }), { before: "", marked: "ab", after: "cdef" });
  assert.deepEqual(piecesOf("abcdef", 10, { start: 2, end: 9 }), { before: "abcdef", marked: "", after: "" });
});

test("a quote is found over other white space, and special characters are only that", () => {
  assert.equal(quoteIn("He said:\n  (a+b)* costs $5", "(a+b)*   costs $5").marked, "(a+b)* costs $5");
  const punctuation = "well-known !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
  assert.equal(quoteIn(`It is ${punctuation} here`, punctuation).marked, punctuation);
  assert.equal(quoteIn("nothing", "else").marked, "");
});

test("sentences end where they end", () => {
  const text = "It is 3.5 m deep. See e.g. page 4!\nA line\n\n你好。再见？Yes";
  assert.deepEqual(sentencesOf(text).map(({ start, end }) => text.slice(start, end)), ["It is 3.5 m deep.", "See e.g.", "page 4!", "A line", "你好。", "再见？", "Yes"]);
});

test("the sentence that answers is found, and shown with what is around it", () => {
  const filler = "On this day the station measured the depth. ".repeat(20);
  const passage = `${filler}The emergency code is KESTREL-77. ${filler}`;
  const span = answeringSentence(passage, "What is the emergency code of the station?", "It is KESTREL-77.");
  assert.equal(passage.slice(span?.start, span?.end), "The emergency code is KESTREL-77.");
  const excerpt = excerptOf(passage, "What is the emergency code of the station?", "", 120);
  assert.equal(excerpt.marked, "The emergency code is KESTREL-77.");
  assert.ok(excerpt.before.startsWith("…") && excerpt.after.endsWith("…"));
  assert.ok((excerpt.before + excerpt.marked + excerpt.after).length < 130);
  assert.deepEqual(excerptOf("short", "anything", "", 120), { before: "short", marked: "", after: "" });
  assert.equal(answeringSentence("合同于三月签订。违约金为百分之五。", "违约金是多少", "")?.start, 8);
});

test("a search result shows the word that was searched for", () => {
  const { found, before } = snippetOf("x ".repeat(100) + "Locker 42 is mine", "locker");
  assert.equal(found, "Locker");
  assert.ok(before.startsWith("…"));
});
