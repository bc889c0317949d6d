/** Which sentence of a passage answers: the one with the rarest words of the question and the answer. Pure. */

/** Words of letters and digits; each Chinese character is one. */
const WORD = /\p{Script=Han}|[\p{L}\p{N}][\p{L}\p{N}'-]*/gu;
const COMMON_CHARS = 3;
/** A line's end ends a sentence, too: documents have lists and tables. */
const SENTENCE = /[^.!?。！？\n]*(?:[.!?。！？]+(?=\s|$|[^\x00-\x7f])|[.!?。！？](?=\S)|\n|$)/gu;

export interface Span {
  start: number;
  end: number;
}

function tellingWords(text: string): Set<string> {
  const words = (text.toLowerCase().match(WORD) ?? []) as string[];
  return new Set(words.filter((word) => word.length > COMMON_CHARS || /[\p{N}\p{Script=Han}]/u.test(word)));
}

/** The sentences of a text, without the white space around them. */
export function sentencesOf(text: string): Span[] {
  const spans: Span[] = [];
  let start = 0;
  for (const found of text.matchAll(SENTENCE)) {
    const end = found.index + found[0].length;
    // "3.5" and "e.g. this" aren't ends: the next piece goes on without white space.
    if (end < text.length && /\S/.test(text[end] ?? "") && /[.!?]$/.test(found[0])) continue;
    const piece = text.slice(start, end);
    const lead = piece.length - piece.trimStart().length;
    if (piece.trim() !== "") spans.push({ start: start + lead, end: start + piece.trimEnd().length });
    start = end;
  }
  return spans;
}

/** The sentence of `passage` that has most to do with `asked` and `said`; null where none has. */
export function answeringSentence(passage: string, asked: string, said: string): Span | null {
  const wanted = [tellingWords(asked), tellingWords(said)];
  const sentences = sentencesOf(passage).map((span) => ({ span, words: tellingWords(passage.slice(span.start, span.end)) }));
  const rarity = (word: string) => 1 / Math.max(1, sentences.filter(({ words }) => words.has(word)).length);
  let best = 0;
  let found: Span | null = null;
  for (const { span, words } of sentences) {
    const weight = [...words].reduce((sum, word) => sum + rarity(word) * wanted.filter((set) => set.has(word)).length, 0);
    if (weight > best + 1e-9) [best, found] = [weight, span];
  }
  return found;
}

export interface Excerpt {
  before: string;
  marked: string;
  after: string;
}

/** About `size` characters of `passage` around the sentence that answers. */
export function excerptOf(passage: string, asked: string, said: string, size: number): Excerpt {
  const flat = (text: string) => text.replace(/\s+/g, " ");
  const span = answeringSentence(passage, asked, said);
  if (!span) return { before: cut(flat(passage.trim()), size), marked: "", after: "" };
  const marked = flat(passage.slice(span.start, Math.min(span.end, span.start + size)));
  const room = Math.max(0, size - marked.length);
  const before = flat(passage.slice(0, span.start)).trimStart();
  const kept = before.length <= room * 0.3 ? before : before.slice(before.length - Math.floor(room * 0.3)).replace(/^\S*\s/, "");
  const lead = kept.length < before.length ? `…${kept}` : kept;
  return { before: lead, marked, after: cut(flat(passage.slice(span.end)).trimEnd(), room - kept.length) };
}

function cut(text: string, size: number): string {
  return text.length <= size ? text : `${text.slice(0, Math.max(0, size))}…`;
}
