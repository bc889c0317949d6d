/**
 * One conversation: its turns, and the answer that is being made. The server keeps the turns; this holds them while they
 * are looked at, sends questions, follows answers through dropped connections and restarts, and says what went wrong.
 */
import { computed, signal } from "@preact/signals";
import { answer, AnswerLost, rejoin, stop, type AnswerEvent, type Ask } from "../api/answers";
import { Refused } from "../api/client";
import { readFeedback } from "../api/memory";
import { readSession } from "../api/sessions";
import type { Feedback, Session } from "../api/types";
import { Entry, keptEntry, Live } from "./entry";
import { messagesFor } from "./history";
import { forgetPending, notePending, pendingOf } from "./pending";
import { noteSession, sessionOf } from "./conversations";
import { modelToAsk } from "./models";
import { useProfile, within } from "./settings";

export type ThreadState = { is: "loading" } | { is: "ready" } | { is: "missing" } | { is: "failed"; error: unknown };

export interface Asking {
  text: string;
  files: readonly string[];
  /** Another answer to the same question: it is sampled, so that it can differ. */
  anew?: boolean;
}

export class Thread {
  readonly state = signal<ThreadState>({ is: "loading" });
  readonly entries = signal<readonly Entry[]>([]);
  readonly feedback = signal<ReadonlyMap<string, Feedback & { id: string }>>(new Map());
  readonly answering = computed(() => this.entries.value.at(-1)?.live.value != null);
  /** Settles when the turns were read, or couldn't be. */
  loaded: Promise<void> = Promise.resolve();
  private leaving = new AbortController();
  private stopping = false;
  private made = 0;

  constructor(readonly session: string) {}

  /** The number of the last turn that the server keeps. */
  get kept(): number {
    return this.entries.peek().findLast((each) => each.turn.peek() !== null)?.turn.peek() ?? 0;
  }

  load(): void {
    this.loaded = this.read();
  }

  private async read(): Promise<void> {
    this.state.value = { is: "loading" };
    try {
      const { session, turns } = await readSession(this.session);
      noteSession(summaryOf(session));
      this.entries.value = turns.map(keptEntry);
      this.state.value = { is: "ready" };
      void this.loadFeedback();
      this.rejoinPending();
    } catch (error) {
      if (error instanceof Refused && error.status === 404) {
        const pending = pendingOf(this.session);
        this.state.value = pending ? { is: "ready" } : { is: "missing" };
        this.rejoinPending();
      } else this.state.value = { is: "failed", error };
    }
  }

  async loadFeedback(): Promise<void> {
    try {
      const given = await readFeedback(this.session);
      this.feedback.value = new Map(given.map((each) => [each.answer_id, each]));
    } catch {
      // Ratings are shown where they can be read; the conversation is complete without them.
    }
  }

  /** Send a question; its answer goes on in the background. */
  ask(asking: Asking): void {
    const question = this.newEntry("user");
    question.text.value = asking.text;
    question.files.value = asking.files;
    const before = this.entries.peek();
    const reply = this.begin([...before, question]);
    void this.follow(question, reply, asking, () => this.asked(before, asking));
  }

  /** Ask in the place of a question that isn't kept: its answer failed, or it was edited before anything was said. */
  askInPlaceOf(question: Entry, asking: Asking): void {
    this.entries.value = this.entries.peek().slice(0, this.entries.peek().indexOf(question));
    this.ask(asking);
  }

  /** The server keeps what was said so far. */
  async stop(): Promise<void> {
    const live = this.entries.peek().at(-1)?.live.peek();
    this.stopping = true;
    const id = live?.id.peek();
    if (!id) return; // stopped as soon as its id is known
    try {
      await stop(id);
    } catch {
      this.leaving.abort(); // it ended meanwhile, or can't be reached; the page stops listening
    }
  }

  /** The conversation was deleted. */
  leave(): void {
    forgetPending(this.session);
    this.leaving.abort();
  }

  private newEntry(speaker: "user" | "assistant"): Entry {
    return new Entry(`new-${this.made++}`, speaker);
  }

  private begin(entries: readonly Entry[]): Entry {
    const reply = this.newEntry("assistant");
    reply.live.value = new Live();
    this.leaving = new AbortController();
    this.stopping = false;
    this.entries.value = [...entries, reply];
    return reply;
  }

  /** The answer to a question, which leaves as soon as it is known whom to ask. */
  private async *asked(before: readonly Entry[], asking: Asking): AsyncGenerator<AnswerEvent> {
    const { signal } = this.leaving;
    const model = await modelToAsk();
    if (this.stopping) return;
    yield* answer(this.request(model, before, asking), signal);
  }

  private request(model: string, before: readonly Entry[], asking: Asking): Ask {
    const ask: Ask = {
      model,
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

  private rejoinPending(): void {
    const pending = pendingOf(this.session);
    if (!pending) return;
    const known = this.entries.peek().some((each) => each.answerId.peek() === pending.id);
    if (known) return forgetPending(this.session); // it was completed meanwhile
    const question = this.newEntry("user");
    question.text.value = pending.question;
    question.files.value = pending.files;
    const reply = this.begin([...this.entries.peek(), question]);
    const asking = { text: pending.question, files: pending.files };
    void this.follow(question, reply, asking, () => rejoin(pending.id, this.leaving.signal));
  }

  /** Read an answer to its end; one that a restart took away is asked for once more. */
  private async follow(question: Entry, reply: Entry, asking: Asking, open: () => AsyncGenerator<AnswerEvent>): Promise<void> {
    let stream = open;
    for (let again = 0; ; again++) {
      try {
        for await (const event of stream()) this.told(reply, asking, event);
        break;
      } catch (error) {
        if (this.leaving.signal.aborted || this.stopping) break;
        if (error instanceof AnswerLost && again === 0 && (await this.isGone(question))) {
          const before = this.entries.peek().slice(0, this.entries.peek().indexOf(question));
          const live = new Live();
          live.connection.value = "again";
          reply.live.value = live;
          stream = () => this.asked(before, asking);
          continue;
        }
        reply.failure.value = error instanceof AnswerLost ? null : error;
        break;
      }
    }
    await this.settle(question, reply);
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
    if (this.stopping && reply.finish.peek() === null) reply.finish.value = "cancelled";
    if (reply.finish.peek() === null && reply.failure.peek() === null) reply.finish.value = "error";
    try {
      await this.wasKept(question, reply);
    } catch {
      // Can't be read now: what was shown stays.
    }
    reply.live.value = null;
    forgetPending(this.session);
  }

  /** Whether the server surely doesn't keep this question. Where it can't be asked, nothing is sent again. */
  private async isGone(question: Entry): Promise<boolean> {
    try {
      return !(await this.wasKept(question));
    } catch {
      return false;
    }
  }

  /** Whether the server keeps this question; it and its answer are then adopted. */
  private async wasKept(question: Entry, reply?: Entry): Promise<boolean> {
    let read;
    try {
      read = await readSession(this.session, this.kept);
    } catch (error) {
      if (error instanceof Refused && error.status === 404) return false;
      throw error;
    }
    noteSession(summaryOf(read.session));
    const at = read.turns.findLastIndex((turn) => turn.speaker === "user");
    const asked = read.turns[at];
    const said = read.turns[at + 1];
    if (!asked || asked.text.trim() !== question.text.peek().trim()) return false;
    question.adopt(asked);
    if (said) (reply ?? this.entries.peek().at(-1))?.adopt(said);
    return true;
  }
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
