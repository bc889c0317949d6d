import assert from "node:assert/strict";
import { test } from "node:test";
import render from "preact-render-to-string";
import { Markdown } from "../src/markdown/Markdown";
import { Blocks, blocksOf, MAX_BLOCK_CHARS, parse } from "../src/markdown/parse";
import { formulaAt } from "../src/markdown/math";

const html = (text: string) => render(<Markdown settled={blocksOf(text)} last="" />);

test("Markdown becomes elements", () => {
  const shown = html("# Title\n\nSome **bold** and *soft* `code`.\n\n- one\n- two\n\n| a | b |\n|--|-:|\n| 1 | 2 |\n");
  for (const part of ["<h3>Title</h3>", "<strong>bold</strong>", "<em>soft</em>", "<code>code</code>", "<li>one</li>", '<td data-align="right">2</td>'])
    assert.ok(shown.includes(part), `${part} in ${shown}`);
});

test("raw HTML stays text", () => {
  const shown = html('<script>alert(1)</script>\n\n<img src=x onerror=alert(1)> <svg onload=alert(1)>\n\n<details open ontoggle="alert(1)">');
  assert.ok(!/<(script|img|svg|details)/i.test(shown), shown);
  assert.ok(shown.includes("&lt;script>"));
});

test("links lead to http, https and mail only", () => {
  const hostile = [
    "[a](javascript:alert(1))",
    "[b](JaVaScRiPt:alert(1))",
    "[c](data:text/html;base64,PHNjcmlwdD4=)",
    "[d](vbscript:x)",
    "[e](\u0001javascript:alert(1))",
    "[f](java\tscript:alert(1))",
    "<javascript:alert(1)>",
    "![g](javascript:alert(1))",
    "![h](data:image/svg+xml;base64,PHN2Zz4=)",
    "[i](file:///etc/passwd)",
    "[j][k]\n\n[k]: javascript:alert(1)",
  ];
  for (const text of hostile) assert.ok(!/href=/.test(html(text)), `${text}: ${html(text)}`);
  assert.ok(html("[ok](https://example.com/a)").includes('href="https://example.com/a"'));
  assert.ok(html("see https://example.com.").includes('href="https://example.com"'));
});

test("pictures aren't fetched; they are links", () => {
  const shown = html("![moon](https://example.com/m.png?secret)");
  assert.ok(!shown.includes("<img") && shown.includes(">moon</a>"), shown);
});

test("formulas are found, prices aren't", () => {
  assert.deepEqual(formulaAt("$x^2$", 0), { tex: "x^2", display: false, end: 5 });
  assert.deepEqual(formulaAt("\\[a\\]", 0), { tex: "a", display: true, end: 5 });
  assert.equal(formulaAt("$5 and $6", 0), null);
  assert.equal(formulaAt("$ 5$", 0), null);
  assert.ok(html("It costs $5 or $6.").includes("$5 or $6"));
  assert.ok(html("$$\n\\frac{a}{b}\n$$").includes("\\frac{a}{b}"));
  assert.ok(html("So \\(y = mx\\) holds").includes("y = mx"));
});

const SAMPLE = "# A\n\nText one\ngoes on.\n\n- a\n- b\n\n  deep\n\n```python\nprint(1)\n\nprint(2)\n```\n\n> q\n\n| a |\n|--|\n| 1 |\n\n1. x\n2. y\n\nThe end. $$z$$\n";

test("a growing text ends as the whole one, whatever pieces it comes in", () => {
  const whole = html(SAMPLE);
  for (const size of [1, 2, 3, 7, 20]) {
    const blocks = new Blocks();
    for (let at = 0; at < SAMPLE.length; at += size) blocks.add(SAMPLE.slice(at, at + size));
    assert.equal(blocks.settled.join("") + blocks.last, SAMPLE);
    const shown = render(<Markdown settled={[...blocks.settled, blocks.last]} last="" />);
    assert.equal(shown, whole, `pieces of ${size}`);
  }
});

test("what is settled isn't touched again", () => {
  const blocks = new Blocks();
  blocks.add("one\n\ntwo\n\nthree");
  const before = [...blocks.settled];
  assert.deepEqual(before, ["one\n\n", "two\n\n"]);
  blocks.add(" more\n\nfour");
  assert.deepEqual(blocks.settled.slice(0, 2), before);
  assert.equal(blocks.last, "four");
});

const HOSTILE: [string, string][] = [
  ["a line of a million characters", "x".repeat(1_000_000)],
  ["ten thousand nested lists", "- ".repeat(10_000) + "deep"],
  ["eight thousand nested lists in a block that is parsed", "- ".repeat(8_000)],
  ["ten thousand nested quotes", "> ".repeat(10_000) + "deep"],
  ["ten thousand opening brackets", "[".repeat(10_000)],
  ["fifty thousand stars", "*a ".repeat(50_000)],
  ["nested emphasis", "*".repeat(8_000) + "a" + "*".repeat(8_000)],
  ["backticks of every length", Array.from({ length: 300 }, (_, n) => "`".repeat(n)).join(" ")],
  ["dollars", "$ $".repeat(5_000)],
  ["open formulas", "\\(".repeat(8_000)],
  ["links in links", "[a](".repeat(4_000)],
  ["a hundred thousand short lines", "a\n\n".repeat(100_000)],
  ["nested lists over lines", Array.from({ length: 400 }, (_, n) => " ".repeat(2 * n) + "- x").join("\n")],
  ["a wide table", `|${"a|".repeat(3_000)}\n|${"-|".repeat(3_000)}\n|${"b|".repeat(3_000)}`],
  ["block formulas that only open", "\\[ x\n".repeat(3_000)],
  ["formulas that end in a text", "$$ a\n".repeat(3_000) + "b $$ c"],
  ["formulas in quotes that only open", "> $$ x\n".repeat(2_000)],
  ["entities", "&#x41;".repeat(20_000)],
  ["zero bytes", "\0".repeat(20_000)],
];

for (const [name, text] of HOSTILE) {
  test(`${name}: parsed and shown in time, nothing lost`, () => {
    const start = performance.now();
    const blocks = blocksOf(text);
    const shown = html(text);
    const spent_ms = performance.now() - start;
    assert.equal(blocks.join(""), text);
    assert.ok(blocks.slice(0, -1).every((each) => each.length <= 4 * MAX_BLOCK_CHARS), "a block is too large");
    assert.ok(shown.length < 4_000_000);
    assert.ok(spent_ms < 3_000, `${Math.round(spent_ms)} ms`); // 0.1 to 0.4 s on an idle core
    console.log(`${name}: ${Math.round(spent_ms)} ms`);
  });
}

test("a table with thousands of rows shows its beginning and the way to the rest", () => {
  const shown = html("|a|b|\n|-|-|\n" + "|1|2|\n".repeat(2_000));
  assert.equal(shown.match(/<tr>/g)?.length, 501);
  assert.ok(shown.includes("1,500 rows left"), shown.slice(-200));
});

test("thousands of characters without white space aren't laid out as prose; Chinese is", () => {
  assert.ok(html("[".repeat(16_000)).includes("Show more"));
  assert.ok(!html("潮汐".repeat(3_000)).includes("Show more"));
});

const GROWING: [string, string][] = [
  ["a block formula that only opens", "\\[ x\n".repeat(8_000)],
  ["formulas that only open", "\\( a ".repeat(8_000)],
  ["one paragraph", "some words ".repeat(4_000)],
  ["one list", "- an item\n".repeat(4_000)],
  ["one table", "| a | b |\n|--|--|\n" + "| one | two |\n".repeat(3_000)],
];

for (const [name, text] of GROWING) {
  test(`${name}: while it grows, no frame looks through all of it again`, () => {
    const blocks = new Blocks();
    const start = performance.now();
    for (let at = 0; at < text.length; at += 200) blocks.add(text.slice(at, at + 200));
    const spent_ms = performance.now() - start;
    assert.equal(blocks.settled.join("") + blocks.last, text);
    assert.ok(spent_ms < 6_000, `${Math.round(spent_ms)} ms`); // 0.1 to 0.6 s on an idle core
    console.log(`${name}: ${Math.round(spent_ms)} ms`);
  });
}

test("a formula may span lines, and one that only opens is text", () => {
  assert.equal(parse("$$\na\n\nb\n$$\n")[0]?.kind, "formula");
  assert.equal(parse("$$ a\nb $$ c\n\n$$ d $$\n").filter((each) => each.kind === "formula").length, 1);
  assert.ok(html("\\[ a\n\n\\[ b \\]\n").includes("b"));
});
