/** Where a quote stands in a page's text. Pure. Offsets of the server count code points; JavaScript's strings don't. */

export interface Pieces {
  before: string;
  marked: string;
  after: string;
}

/** The UTF-16 index of code point number `point`. */
export function unitAt(text: string, point: number): number {
  let unit = 0;
  for (let at = 0; at < point && unit < text.length; at++) {
    unit += (text.codePointAt(unit) ?? 0) > 0xffff ? 2 : 1;
  }
  return unit;
}

/** The number of code points before UTF-16 index `unit`. */
export function pointAt(text: string, unit: number): number {
  let point = 0;
  for (let at = 0; at < unit; at += (text.codePointAt(at) ?? 0) > 0xffff ? 2 : 1) point++;
  return point;
}

/** The page's text around the part that `mark` names; `start` is the page's own place in the whole text. */
export function piecesOf(text: string, start: number, mark: { start: number; end: number } | null): Pieces {
  if (!mark || mark.end <= start) return { before: text, marked: "", after: "" };
  const from = unitAt(text, Math.max(0, mark.start - start));
  const to = unitAt(text, Math.max(0, mark.end - start));
  return { before: text.slice(0, from), marked: text.slice(from, to), after: text.slice(to) };
}

/** A quote in a text that may have other white space; not found: nothing is marked. */
export function quoteIn(text: string, quote: string): Pieces {
  const words = quote.trim().split(/\s+/).filter((word) => word !== "");
  if (words.length === 0 || words.length > 2_000) return { before: text, marked: "", after: "" };
  const pattern = words.map((word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")).join("\\s+");
  const found = new RegExp(pattern, "u").exec(text);
  if (!found) return { before: text, marked: "", after: "" };
  const end = found.index + found[0].length;
  return { before: text.slice(0, found.index), marked: found[0], after: text.slice(end) };
}
