/**
 * One conversation: its turns, and the answer that is being made. The server keeps the turns; this holds them while they
 * are looked at, sends questions, follows answers through dropped connections and restarts, and says what went wrong.
 */
import { computed, signal } from "@preact/signals";
import { answer, AnswerLost, rejoin, stop, type AnswerEvent, type Ask } from "../api/answers";
import { Refused, Unreachable } from "../api/client";
import { readFeedback } from "../api/memory";
import { readSession } from "../api/sessions";
import type { Feedback, FinishReason, Session } from "../api/types";
import { Entry, keptEntry, Live } from "./entry";
import { messagesFor } from "./history";
import { draftOf } from "./drafts";
import { forgetPending, notePending, pendingOf } from "./pending";
import { noteSession, sessionOf } from "./conversations";
import { forgetModels, modelToAsk } from "./models";
import { useProfile, within } from "./settings";

export type ThreadState = { is: "loading" } | { is: "ready" } | { is: "missing" } | { is: "failed"; error: unknown };

export interface Asking {
  text: string;
  files: readonly string[];
  /** Another answer to the same question: it is sampled, so that it can differ. */
  anew?: boolean;
  /** A restart took its first answer away: that is said, and it isn't asked a third time. */
  again?: boolean;
}

/** A small model may repeat itself for ever: its answer ends here, with a button to go on. Thoughts count. */
const ANSWER_TOKENS = 2_048;

type Fate = "kept" | "unkept" | "deleted" | "unknown";

export class Thread {
  readonly state = signal<ThreadState>({ is: "loading" });
  readonly entries = signal<readonly Entry[]>([]);
  readonly feedback = signal<ReadonlyMap<string, Feedback & { id: string }>>(new Map());
  readonly answering = computed(() => this.entries.value.at(-1)?.live.value != null);
  /** Settles when the turns were read, or couldn't be. */
  private loaded: Promise<void> = Promise.resolve();
  private leaving = new AbortController();
  private stopping = false;
  private sent = false;
  /** Nobody heard that it is to stop: what became of it can't be asked either. */
  private unheard = false;
  private deleted = false;
  private made = 0;

  constructor(readonly session: string) {}

  /** The number of the last turn that the server keeps. */
  get kept(): number {
    return this.entries.peek().findLast((each) => each.turn.peek() !== null)?.turn.peek() ?? 0;
  }

  load(): void {
    this.loaded = this.read();
  }

  /** What was asked meanwhile stays, behind what is read. */
  private async read(): Promise<void> {
    this.state.value = { is: "loading" };
    try {
      const { session, turns } = await readSession(this.session);
      if (this.deleted) return;
      noteSession(summaryOf(session));
      this.entries.value = [...turns.map(keptEntry), ...this.unkept()];
      this.state.value = { is: "ready" };
      void this.loadFeedback();
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) this.state.value = { is: "failed", error };
      else this.state.value = pendingOf(this.session) ? { is: "ready" } : { is: "missing" };
    }
    if (this.state.peek().is === "ready") this.rejoinPending();
  }

  private unkept(): Entry[] {
    return this.entries.peek().filter((each) => each.turn.peek() === null);
  }

  async loadFeedback(): Promise<void> {
    try {
      const given = await readFeedback(this.session);
      this.feedback.value = new Map(given.map((each) => [each.answer_id, each]));
    } catch {
      // Ratings are shown where they can be read; the conversation is complete without them.
    }
  }

  /**
   * Send a question, as soon as the turns before it are known; its answer goes on in the background. Gives the question
   * where a restart tore the answer off and what was said is kept, so that it can be asked again only beside that.
   */
  ask(asking: Asking): Promise<Entry | null> {
    if (this.state.peek().is === "failed") this.load();
    const question = this.newEntry("user");
    question.text.value = asking.text;
    question.files.value = asking.files;
    const reply = this.begin(question, asking.again);
    return this.follow(question, reply, asking, () => this.asked(question, asking), !asking.again);
  }

  /** Ask in the place of a question that isn't kept: its answer failed, or it was edited before anything was said. */
  async askInPlaceOf(question: Entry, asking: Asking): Promise<Entry | null> {
    if (!this.entries.peek().includes(question)) return null; // it was asked again already
    this.entries.value = this.before(question);
    return this.ask(asking);
  }

  /** The server keeps what was said so far. */
  async stop(): Promise<void> {
    const id = this.entries.peek().at(-1)?.live.peek()?.id.peek();
    this.stopping = true;
    if (!id && this.sent) return; // stopped as soon as its id is known
    try {
      if (id) await stop(id);
    } catch (error) {
      this.unheard = error instanceof Unreachable; // else it ended meanwhile
    }
    this.leaving.abort();
  }

  /** The conversation was deleted. */
  leave(): void {
    this.deleted = true;
    this.leaving.abort();
  }

  private newEntry(speaker: "user" | "assistant"): Entry {
    return new Entry(`new-${this.made++}`, speaker);
  }

  private begin(question: Entry, again = false): Entry {
    const reply = this.newEntry("assistant");
    reply.live.value = new Live(again);
    this.leaving = new AbortController();
    this.stopping = this.sent = this.unheard = false;
    this.entries.value = [...this.entries.peek(), question, reply];
    return reply;
  }

  private before(question: Entry): readonly Entry[] {
    return this.entries.peek().slice(0, this.entries.peek().indexOf(question));
  }

  /** The answer to a question, which leaves as soon as it is known what was said before and whom to ask. */
  private async *asked(question: Entry, asking: Asking): AsyncGenerator<AnswerEvent> {
    const { signal } = this.leaving;
    await unlessAborted(this.loaded, signal);
    const state = this.state.peek();
    if (state.is === "failed") throw state.error;
    if (state.is === "missing") throw new Refused(404, "not_found", "");
    const model = await unlessAborted(modelToAsk(), signal);
    this.sent = true;
    yield* answer(this.request(model, this.before(question), asking), signal);
  }

  private request(model: string, before: readonly Entry[], asking: Asking): Ask {
    const ask: Ask = {
      model,
      max_tokens: ANSWER_TOKENS,
      session: this.session,
      messages: messagesFor(before, asking.text, asking.files),
      profile: useProfile.peek(),
    };
    if (within.peek() === "full") ask.context_policy = "full";
    else ask.deadline_s = Number(within.peek());
    if (asking.anew) {
      ask.temperature = 0.7;
      ask.seed = crypto.getRandomValues(new Uint32Array(1))[0]! >>> 1;
    }
    return ask;
  }

  /** Take up the answer that was under way when the page was left. It is never asked for again: that is long ago, perhaps. */
  private rejoinPending(): void {
    const pending = pendingOf(this.session);
    if (!pending || this.answering.peek()) return;
    const known = this.entries.peek().some((each) => each.answerId.peek() === pending.id);
    if (known) return forgetPending(this.session); // it was completed meanwhile
    const question = this.newEntry("user");
    question.text.value = pending.question;
    question.files.value = pending.files;
    const reply = this.begin(question);
    this.sent = true;
    const asking = { text: pending.question, files: pending.files };
    void this.follow(question, reply, asking, () => rejoin(pending.id, this.leaving.signal), false);
  }

  /** Read an answer to its end; one that a restart took away is asked for once more where that `mayRepeat`. */
  private async follow(
    question: Entry,
    reply: Entry,
    asking: Asking,
    open: () => AsyncGenerator<AnswerEvent>,
    mayRepeat: boolean,
  ): Promise<Entry | null> {
    let torn = false;
    try {
      for await (const event of open()) this.told(reply, asking, event);
    } catch (error) {
      if (this.leaving.signal.aborted || this.stopping) {
        this.unheard ||= error instanceof Unreachable;
        await this.settle(question, reply);
        return null;
      }
      if (error instanceof Refused && error.code === "model_not_found") forgetModels();
      if (!(error instanceof AnswerLost)) reply.failure.value = error;
      else {
        const fate = await this.fateOf(question, reply);
        if (fate === "unkept" && mayRepeat) {
          reply.live.value = new Live(true);
          return this.follow(question, reply, asking, () => this.asked(question, asking), false);
        }
        reply.torn.value = true;
        torn = fate === "kept" && isBroken(reply.finish.peek());
      }
    }
    await this.settle(question, reply);
    return torn && mayRepeat ? question : null;
  }

  private told(reply: Entry, asking: Asking, event: AnswerEvent): void {
    const live = reply.live.peek();
    if (!live) return;
    live.heardAt = performance.now();
    if (event.kind !== "reconnecting" && live.connection.peek() === "lost") live.connection.value = "open";
    switch (event.kind) {
      case "opened":
        live.id.value = event.id;
        reply.answerId.value = event.id;
        notePending({ session: this.session, id: event.id, question: asking.text, files: asking.files });
        if (this.stopping) void this.stop();
        break;
      case "stage":
        live.stage.value = event.stage;
        break;
      case "planned":
        live.planned.value = event.planned;
        break;
      case "prefilling":
        live.stage.value = "prefilling";
        live.progress.value = { ...event, toldAt: performance.now() };
        break;
      case "citation":
        live.citations.value = [...live.citations.peek(), event.citation];
        break;
      case "thought":
        live.addThought(event.text);
        break;
      case "text":
        live.addText(event.text);
        break;
      case "finished":
        reply.finish.value = event.reason;
        reply.report.value = event.report;
        break;
      case "usage":
        reply.usage.value = event.usage;
        break;
      case "reconnecting":
        live.connection.value = "lost";
        break;
      case "alive":
        break;
    }
  }

  /** After the end, whatever it was: what the server keeps takes the place of what was shown. */
  private async settle(question: Entry, reply: Entry): Promise<void> {
    const live = reply.live.peek();
    if (reply.turn.peek() === null) reply.text.value = live?.text ?? ""; // else the whole of it was adopted already
    reply.thoughts.value = live?.thoughts ?? "";
    if (this.stopping && reply.finish.peek() === null) reply.finish.value = "cancelled";
    if (reply.finish.peek() === null && reply.failure.peek() === null) reply.finish.value = "error";
    if (this.sent && !this.unheard) await this.fateOf(question, reply);
    if (this.state.peek().is === "missing") draftOf(null).text.value ||= question.text.peek(); // nothing typed is lost
    reply.live.value = null;
    forgetPending(this.session);
  }

  /** What became of a question on the server. One that is kept is adopted, with its answer. */
  private async fateOf(question: Entry, reply: Entry): Promise<Fate> {
    const before = this.kept;
    let read;
    try {
      read = await readSession(this.session, before);
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) return "unknown"; // what was shown stays, and nothing is sent again
      if (before === 0) return "unkept"; // it would have begun the conversation
      this.state.value = { is: "missing" };
      return "deleted";
    }
    if (!this.deleted) noteSession(summaryOf(read.session));
    const at = read.turns.findLastIndex((turn) => turn.speaker === "user");
    const asked = read.turns[at];
    const said = read.turns[at + 1];
    if (!asked || asked.text.trim() !== question.text.peek().trim()) return "unkept";
    question.adopt(asked);
    if (said) reply.adopt(said);
    return "kept";
  }
}

/** Whether an answer, as it is kept, ended before it was complete. */
function isBroken(finish: FinishReason | null): boolean {
  return finish === "cancelled" || finish === "error";
}

/** Throws what `signal` was aborted with, without waiting for the rest. */
function unlessAborted<T>(waiting: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const leave = () => reject(signal.reason as Error);
    if (signal.aborted) return leave();
    signal.addEventListener("abort", leave, { once: true });
    waiting.then(resolve, reject);
  });
}

function summaryOf(session: Session): Session {
  const known = sessionOf(session.id);
  return {
    id: session.id,
    title: session.title ?? known?.title ?? null,
    turns: session.turns,
    created_at: session.created_at,
    updated_at: session.updated_at ?? session.created_at,
    parent: session.parent ?? null,
  };
}
