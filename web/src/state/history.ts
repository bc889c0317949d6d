/**
 * Which messages go along with a question. The newest ones; what is older the server finds itself. The beginning moves in
 * strides, not with every question, so that a prompt begins as the last one did and is found in the cache.
 */
import type { Message, Part } from "../api/answers";
import type { Entry } from "./entry";

export const NEWEST = 24;
export const STRIDE = 12;
export const MAX_CHARS = 24_000;

/** Where the messages that are sent begin: an even number, so that a question comes first. */
export function beginning(lengths: readonly number[]): number {
  let from = lengths.length <= NEWEST ? 0 : Math.ceil((lengths.length - NEWEST) / STRIDE) * STRIDE;
  while (from < lengths.length && lengths.slice(from).reduce((sum, each) => sum + each, 0) > MAX_CHARS) from += 2;
  return Math.min(from, lengths.length);
}

/** The conversation so far and the question. A document stands where it was first asked about. */
export function messagesFor(before: readonly Entry[], text: string, files: readonly string[]): Message[] {
  const said = before.filter((each) => each.text.peek().trim() !== "" && each.live.peek() === null);
  const from = beginning(said.map((each) => each.text.peek().length));
  const sent = new Set<string>();
  const fresh = (ids: readonly string[]) => ids.filter((id) => !sent.has(id) && sent.add(id));
  const early = fresh(said.slice(0, from).flatMap((each) => each.files.peek()));
  const messages: Message[] = said.slice(from).map((each) => ({
    role: each.speaker,
    content: withFiles(each.text.peek(), fresh(each.files.peek())),
  }));
  messages.push({ role: "user", content: withFiles(text, fresh(files)) });
  const first = messages.find((each) => each.role === "user");
  if (first && early.length > 0) first.content = withFiles(first.content, early);
  return messages;
}

function withFiles(content: string | Part[], files: readonly string[]): string | Part[] {
  if (files.length === 0) return content;
  const parts: Part[] = typeof content === "string" ? [{ type: "text", text: content }] : content;
  return [...files.map((id): Part => ({ type: "file", file: { file_id: id } })), ...parts];
}
