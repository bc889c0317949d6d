/** What an error means to somebody, in their language by its code; the server's own words where they help. */
import { Refused, Unreachable } from "../api/client";
import { hasText, inWords, t, type Key } from ".";

export function sentenceOf(error: unknown): string {
  if (error instanceof Unreachable) return t("error.offline");
  if (error instanceof Refused) return t(keyOf(error) ?? "error.refused");
  return t("error.unknown");
}

/** The server's words, for those who want them; empty where it said nothing. */
export function detailsOf(error: unknown): string {
  return error instanceof Refused ? error.message : "";
}

/** One line, where there is room for no more: the server's own, with its figures, where it is in the reader's language. */
export function lineOf(error: unknown): string {
  const sentence = sentenceOf(error);
  if (!(error instanceof Refused) || error.message === "") return sentence;
  return inWords(`error.${error.code}`, error.message);
}

function keyOf(error: Refused): Key | null {
  const key = `error.${error.code}`;
  return hasText(key) ? key : null;
}
