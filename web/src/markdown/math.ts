/** Formulas in Markdown: $…$, $$…$$, \(…\) and \[…\]. Finds them; `Formula` shows them. Prices stay text. */
import type { MarkdownIt, StateBlock, StateInline } from "markdown-it";

const DOLLAR = 0x24;
const BACKSLASH = 0x5c;

/** Where a formula that begins at `start` ends: [end of its text, position behind it]; null where none ends. */
function closing(text: string, from: number, mark: string): [number, number] | null {
  let end = text.indexOf(mark, from);
  while (end > 0 && text.charCodeAt(end - 1) === BACKSLASH && mark[0] !== "\\") end = text.indexOf(mark, end + 1);
  return end < 0 ? null : [end, end + mark.length];
}

/**
 * The inline formula at `start`: its text, whether it stands alone, and where it ends. `unclosed` holds the marks that
 * don't come any more in this text, so that thousands that only open are looked through once.
 */
export function formulaAt(
  text: string,
  start: number,
  unclosed = new Set<string>(),
): { tex: string; display: boolean; end: number } | null {
  const two = text.slice(start, start + 2);
  const [open, close, display] =
    two === "$$"
      ? ["$$", "$$", true]
      : two === "\\("
        ? ["\\(", "\\)", false]
        : two === "\\["
          ? ["\\[", "\\]", true]
          : text[start] === "$"
            ? ["$", "$", false]
            : ["", "", false];
  if (!open || !close || unclosed.has(close)) return null;
  const found = closing(text, start + open.length, close);
  if (!found) unclosed.add(close);
  if (!found) return null;
  const tex = text.slice(start + open.length, found[0]);
  if (tex.trim() === "") return null;
  // "$5 and $6": a dollar that opens has no space behind it, one that closes none before it and no digit behind it.
  if (open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(text[found[1]] ?? "") || tex.includes("\n\n"))) return null;
  return { tex: tex.trim(), display, end: found[1] };
}

const unclosedIn = new WeakMap<StateInline, Set<string>>();

function inlineRule(state: StateInline, silent: boolean): boolean {
  const code = state.src.charCodeAt(state.pos);
  if (code !== DOLLAR && code !== BACKSLASH) return false;
  const unclosed = unclosedIn.get(state) ?? new Set();
  unclosedIn.set(state, unclosed);
  const found = formulaAt(state.src, state.pos, unclosed);
  if (!found || found.end > state.posMax) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = found.tex;
    token.meta = { display: found.display };
  }
  state.pos = found.end;
  return true;
}

const FENCES: Record<string, string> = { $$: "$$", "\\[": "\\]" };

/** By mark, the line before which no formula ends well: thousands that only open are looked through once. */
const barrenIn = new WeakMap<StateBlock, Map<string, number>>();

/** A formula that begins a line and may span several. */
function blockRule(state: StateBlock, startLine: number, endLine: number, silent: boolean): boolean {
  const start = state.bMarks[startLine]! + state.tShift[startLine]!;
  const close = FENCES[state.src.slice(start, start + 2)];
  if (!close || state.sCount[startLine]! - state.blkIndent >= 4) return false;
  const barren = barrenIn.get(state) ?? new Map<string, number>();
  barrenIn.set(state, barren);
  if (startLine < (barren.get(close) ?? 0)) return false;
  const lines: string[] = [];
  for (let line = startLine; line < endLine; line++) {
    const from = line === startLine ? start + 2 : state.bMarks[line]! + Math.min(state.tShift[line]!, state.blkIndent);
    const text = state.src.slice(from, state.eMarks[line]);
    const end = text.indexOf(close);
    if (end < 0) {
      lines.push(text);
      continue;
    }
    if (text.slice(end + 2).trim() !== "") {
      barren.set(close, line);
      return false; // text goes on behind it: a formula in a line
    }
    lines.push(text.slice(0, end));
    if (silent) return true;
    const token = state.push("formula", "", 0);
    token.block = true;
    token.content = lines.join("\n").trim();
    token.meta = { display: true };
    token.map = [startLine, line + 1];
    state.line = line + 1;
    return true;
  }
  barren.set(close, endLine);
  return false;
}

export function formulas(markdown: MarkdownIt): void {
  markdown.inline.ruler.before("escape", "formula", inlineRule);
  markdown.block.ruler.before("fence", "formula", blockRule, { alt: ["paragraph", "blockquote", "list"] });
}
