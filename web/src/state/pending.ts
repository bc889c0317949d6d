/** Answers that were under way when the page was left, so that a reload finds them again. Lives as long as the tab. */
import { readStored, writeStored } from "./stored";

export interface Pending {
  session: string;
  id: string;
  question: string;
  files: readonly string[];
}

const NAME = "pending";

function all(): Pending[] {
  try {
    return JSON.parse(readStored(NAME, "session") ?? "[]") as Pending[];
  } catch {
    return []; // written by another version of the page
  }
}

export function notePending(pending: Pending): void {
  writeStored(NAME, JSON.stringify([...all().filter((each) => each.session !== pending.session), pending]), "session");
}

export function forgetPending(session: string): void {
  const left = all().filter((each) => each.session !== session);
  writeStored(NAME, left.length > 0 ? JSON.stringify(left) : null, "session");
}

export function pendingOf(session: string): Pending | undefined {
  return all().find((each) => each.session === session);
}
