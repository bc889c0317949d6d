/** What an error means to somebody, in one sentence of their language; the server's own words follow where they help. */
import { Refused, Unreachable } from "../api/client";
import { hasText, t } from ".";

export function sentenceOf(error: unknown): string {
  if (error instanceof Unreachable) return t("error.unreachable");
  if (error instanceof Refused) {
    const known = `error.${error.code}`;
    return hasText(known) ? t(known) : t("error.refused");
  }
  return t("error.unknown");
}

/** The server's words, for those who want them; empty where it said nothing. */
export function detailsOf(error: unknown): string {
  return error instanceof Refused ? error.message : "";
}
