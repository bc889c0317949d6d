/**
 * Markdown to a tree, and a growing text to its blocks. Makes no HTML: raw HTML in a text stays text, links other than
 * http, https and mailto stay text, images become links. What is too large to lay out is handed on as it is.
 */
import MarkdownIt, { type Token } from "markdown-it";
import { formulas } from "./math";

/** A longer block isn't parsed: no model writes one, and pathological text could hold the page up. */
export const MAX_BLOCK_CHARS = 16_384;

const MAX_DEPTH = 60;

export interface Leaf {
  kind: "text" | "code" | "fence" | "formula" | "break" | "rule";
  text: string;
  /** Of a fence: its language; of a formula: "display" when it stands alone. */
  info: string;
}

export interface Branch {
  kind: "branch";
  tag: string;
  /** Of a link: where it leads; of an ordered list: its first number; of a cell: its alignment. */
  detail: string;
  children: Node[];
}

export type Node = Leaf | Branch;

const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

function isSafeLink(address: string): boolean {
  return SAFE_LINK.test(address.trim());
}

const parser = new MarkdownIt({ html: false, linkify: true, maxNesting: 24 }).use(formulas);
parser.validateLink = isSafeLink;
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

/** The tree of a block that `MAX_BLOCK_CHARS` allows. */
export function parse(source: string): Node[] {
  const root: Branch = { kind: "branch", tag: "", detail: "", children: [] };
  addAll(parser.parse(source, {}), root);
  return root.children;
}

function addAll(tokens: readonly Token[], root: Branch): void {
  const open: Branch[] = [root];
  for (const token of tokens) {
    const inside = open[open.length - 1] ?? root;
    if (token.nesting < 0) {
      if (!token.hidden && open.length > 1) open.pop();
    } else if (token.nesting > 0) {
      if (token.hidden) continue; // the paragraph of a tight list's item
      const branch: Branch = { kind: "branch", tag: token.tag, detail: detailOf(token), children: [] };
      const tooDeep = open.length > MAX_DEPTH; // thousands of nested emphases: what is inside goes into the outer one
      if (!tooDeep) inside.children.push(branch);
      open.push(tooDeep ? inside : branch);
    } else if (token.type === "inline") {
      addAll(token.children ?? [], inside);
    } else if (token.type === "image") {
      inside.children.push(imageLink(token));
    } else {
      inside.children.push(leafOf(token));
    }
  }
}

function detailOf(token: Token): string {
  if (token.tag === "a") return String(token.attrGet("href") ?? "");
  if (token.tag === "ol") return String(token.attrGet("start") ?? "");
  if (token.tag === "td" || token.tag === "th") return /text-align:(\w+)/.exec(String(token.attrGet("style") ?? ""))?.[1] ?? "";
  return "";
}

/** A picture would be fetched from wherever a text says; a link is followed only by somebody who wants to. */
function imageLink(token: Token): Branch {
  const address = String(token.attrGet("src") ?? "");
  const label: Leaf = { kind: "text", text: token.content || address, info: "" };
  return { kind: "branch", tag: "a", detail: isSafeLink(address) ? address : "", children: [label] };
}

function leafOf(token: Token): Leaf {
  switch (token.type) {
    case "fence":
      return { kind: "fence", text: token.content, info: (token.info.trim().split(/\s+/)[0] ?? "").slice(0, 30) };
    case "code_block":
      return { kind: "fence", text: token.content, info: "" };
    case "code_inline":
      return { kind: "code", text: token.content, info: "" };
    case "formula":
      return { kind: "formula", text: token.content, info: (token.meta as { display: boolean }).display ? "display" : "" };
    case "hardbreak":
      return { kind: "break", text: "", info: "" };
    case "softbreak":
      return { kind: "text", text: "\n", info: "" };
    case "hr":
      return { kind: "rule", text: "", info: "" };
    default:
      return { kind: "text", text: token.content, info: "" };
  }
}

/**
 * The blocks of a text that grows at its end. A block that another one follows can't change any more (but for link
 * definitions, which models don't write), so only the last one is ever looked at again; and a huge one, which is shown
 * as it is, only after it has grown by much.
 */
export class Blocks {
  readonly settled: string[] = [];
  last = "";
  private nextLook = 0;

  add(text: string): void {
    const piece = 2 * MAX_BLOCK_CHARS;
    for (let at = 0; at < text.length; at += piece) this.addPiece(text.slice(at, at + piece));
  }

  private addPiece(text: string): void {
    this.last += text;
    if (this.last.length < this.nextLook) return;
    for (let borders = this.borders(); borders.length > 0; borders = this.last.length > MAX_BLOCK_CHARS ? this.borders() : []) {
      let from = 0;
      for (const to of borders) {
        this.settled.push(this.last.slice(from, to));
        from = to;
      }
      this.last = this.last.slice(from);
    }
    this.nextLook = this.last.length > MAX_BLOCK_CHARS ? this.last.length + MAX_BLOCK_CHARS / 8 : 0;
  }

  /** Where the top-level blocks of `last` begin, without the first; or where one that is too large must be cut. */
  private borders(): number[] {
    if (this.last.length > 4 * MAX_BLOCK_CHARS) return [cutBefore(this.last, 4 * MAX_BLOCK_CHARS)];
    if (this.last.length > MAX_BLOCK_CHARS && !this.last.includes("\n")) return [];
    const tokens: Token[] = [];
    parser.block.parse(normalised(this.last), parser, {}, tokens);
    const lines = tokens
      .filter((token) => token.level === 0 && token.nesting >= 0 && token.map !== null && token.type !== "inline")
      .map((token) => token.map?.[0] ?? 0);
    return offsetsOfLines(this.last, lines.slice(1));
  }
}

/** As the parser does first; lengths of lines may change, their number doesn't. */
function normalised(text: string): string {
  return text.replaceAll("\0", "\uFFFD").replace(/\r\n?/g, "\n");
}

/** Where lines begin; `lines` ascend. */
function offsetsOfLines(text: string, lines: readonly number[]): number[] {
  const offsets: number[] = [];
  const ends = /\r\n?|\n/g;
  let line = 0;
  for (let found = ends.exec(text); found && offsets.length < lines.length; found = ends.exec(text)) {
    line++;
    if (line === lines[offsets.length]) offsets.push(found.index + found[0].length);
  }
  return offsets;
}

/** A place at or before `limit` that doesn't tear a line (or, in a line without end, a character). */
function cutBefore(text: string, limit: number): number {
  const line = text.lastIndexOf("\n", limit);
  if (line > limit / 2) return line + 1;
  const code = text.charCodeAt(limit - 1);
  return code >= 0xd800 && code < 0xdc00 ? limit - 1 : limit;
}

/** A longer text is split so far; what is behind stays in one piece, to be shown on demand. */
const MAX_SPLIT_CHARS = 256 * 1024;

/** The blocks of a whole text. */
export function blocksOf(text: string): string[] {
  const split = text.length > MAX_SPLIT_CHARS ? cutBefore(text, MAX_SPLIT_CHARS) : text.length;
  const blocks = new Blocks();
  blocks.add(text.slice(0, split));
  return [...blocks.settled, blocks.last, text.slice(split)].filter((each) => each !== "");
}
