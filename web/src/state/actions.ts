/** What the buttons of a conversation do: ask, ask anew, edit, branch. Each leads to the conversation that holds the result. */
import { signal } from "@preact/signals";
import { forkSession } from "../api/sessions";
import { attempt } from "./attempt";
import { noteSession, originOf, sessionOf, sessions } from "./conversations";
import type { Entry } from "./entry";
import { isOpen, openConversation } from "./route";
import type { Asking, Thread } from "./thread";
import { newThread, threadOf } from "./threads";

/** Ids are made here, so that a conversation can be shown before the server knows of it. */
function newId(): string {
  const random = crypto.getRandomValues(new Uint8Array(10));
  return "c-" + Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Ask in the open conversation, or begin one. */
export function ask(thread: Thread | null, asking: Asking): void {
  if (thread) return void seeThrough(thread, asking, thread.ask(asking));
  const session = newId();
  const now = Date.now() / 1000;
  noteSession({ id: session, title: asking.text.slice(0, 80), turns: 0, created_at: now, updated_at: now, parent: null });
  const begun = newThread(session);
  openConversation(session);
  void seeThrough(begun, asking, begun.ask(asking));
}

/** Where a restart tore the answer off and kept what was said, the question is asked once more, as another version. */
async function seeThrough(thread: Thread, asking: Asking, asked: Promise<Entry | null>): Promise<void> {
  const question = await asked;
  if (question) await attempt(() => askInstead(thread, question, { ...asking, again: true }));
}

/** Set while a branch is being made: a second click must not make another one. */
export const branching = signal(false);

/** Open a new conversation with what was said up to turn `turn`; null where another one is just being made. */
export async function branchAt(thread: Thread, turn: number): Promise<Thread | null> {
  if (branching.peek()) return null;
  branching.value = true;
  try {
    const session = sessionOf(thread.session);
    const origin = session ? originOf(sessions.peek() ?? [], session, turn + 1) : undefined;
    // What follows turn `turn` may have been said in a conversation that this one is a branch of: its sibling is wanted.
    const fork = await forkSession(origin?.id ?? thread.session, turn);
    noteSession(fork);
    if (isOpen(thread.session)) openConversation(fork.id); // else another one is being looked at meanwhile
    return threadOf(fork.id);
  } finally {
    branching.value = false;
  }
}

/** The question with another text: a version of the conversation that goes on from before it. */
export async function editQuestion(thread: Thread, question: Entry, text: string): Promise<void> {
  await askInstead(thread, question, { text, files: question.files.peek() });
}

/** Another answer to the same question. */
export async function answerAnew(thread: Thread, question: Entry): Promise<void> {
  await askInstead(thread, question, { text: question.text.peek(), files: question.files.peek(), anew: true });
}

async function askInstead(thread: Thread, question: Entry, asking: Asking): Promise<void> {
  const turn = question.turn.peek();
  if (turn === null) return void seeThrough(thread, asking, thread.askInPlaceOf(question, asking)); // nothing is kept
  const branch = await branchAt(thread, turn - 1);
  if (branch) void seeThrough(branch, asking, branch.ask(asking));
}
