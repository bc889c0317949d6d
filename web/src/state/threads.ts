/** The threads that are open or being answered; one per conversation, so that an answer goes on while another is read. */
import { computed, signal } from "@preact/signals";
import { deleteSession } from "../api/sessions";
import { forgetSession } from "./conversations";
import { forgetPending } from "./pending";
import { Thread } from "./thread";

const KEPT = 6;
const threads = signal<ReadonlyMap<string, Thread>>(new Map());

/** The thread of a conversation, read from the server the first time. */
export function threadOf(session: string): Thread {
  const known = threads.peek().get(session);
  if (known) return known;
  const made = new Thread(session);
  made.load();
  return remember(made);
}

/** The thread of a conversation that begins now. */
export function newThread(session: string): Thread {
  const made = new Thread(session);
  made.state.value = { is: "ready" };
  return remember(made);
}

function remember(thread: Thread): Thread {
  const all = [...threads.peek().values(), thread];
  const quiet = all.filter((each) => !each.answering.peek() && each !== thread);
  const dropped = new Set(quiet.slice(0, Math.max(0, quiet.length - KEPT)));
  threads.value = new Map(all.filter((each) => !dropped.has(each)).map((each) => [each.session, each]));
  return thread;
}

/** Delete a conversation, here and on the server. */
export async function deleteConversation(session: string): Promise<void> {
  const open = threads.peek().get(session);
  if (open?.answering.peek()) await open.stop(); // else its answer would be kept after all
  await deleteSession(session);
  open?.leave();
  threads.value = new Map([...threads.peek()].filter(([id]) => id !== session));
  forgetPending(session);
  forgetSession(session);
}

/** The conversations in which an answer is being made. */
export const answeringSessions = computed(
  () => new Set([...threads.value.values()].filter((each) => each.answering.value).map((each) => each.session)),
);
