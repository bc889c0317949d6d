/** One turn as the page holds it: kept on the server, or on its way. */
import { signal, type Signal } from "@preact/signals";
import type { Planned, Stage } from "../api/answers";
import type { Citation, FinishReason, Report, Turn, Usage } from "../api/types";
import { Blocks } from "../markdown/parse";

/** An answer that is being made. `frame` changes, and text becomes blocks, at most once per frame of the screen. */
export class Live {
  readonly startedAt = performance.now();
  readonly id = signal<string | null>(null);
  readonly stage = signal<Stage | "connecting">("connecting");
  readonly planned = signal<Planned | null>(null);
  readonly progress = signal<{ processed: number; total: number; eta_s: number; toldAt: number } | null>(null);
  readonly citations = signal<readonly Citation[]>([]);
  /** "again": a restart took the answer away that was being made before this one. */
  readonly connection: Signal<"open" | "lost" | "again">;
  readonly firstText_s = signal<number | null>(null);
  readonly frame = signal(0);
  readonly blocks = new Blocks();
  heardAt = performance.now();
  thoughts = "";
  private coming = "";
  private scheduled = false;

  constructor(again = false) {
    this.connection = signal(again ? "again" : "open");
  }

  addText(text: string): void {
    if (this.firstText_s.value === null) this.firstText_s.value = (performance.now() - this.startedAt) / 1000;
    this.coming += text;
    this.schedule();
  }

  addThought(text: string): void {
    this.thoughts += text;
    this.schedule();
  }

  get text(): string {
    return this.blocks.settled.join("") + this.blocks.last + this.coming;
  }

  private schedule(): void {
    if (!this.scheduled) requestAnimationFrame(() => this.take());
    this.scheduled = true;
  }

  /** Hundreds of pieces may have come with one packet: finding their blocks once costs what one piece does. */
  private take(): void {
    this.scheduled = false;
    this.blocks.add(this.coming);
    this.coming = "";
    this.frame.value++;
  }
}

export class Entry {
  readonly turn = signal<number | null>(null);
  readonly text = signal("");
  readonly files = signal<readonly string[]>([]);
  readonly at = signal(Date.now() / 1000);
  readonly report = signal<Report | null>(null);
  readonly usage = signal<Usage | null>(null);
  readonly finish = signal<FinishReason | null>(null);
  readonly answerId = signal<string | null>(null);
  /** What the model thought before it answered. */
  readonly thoughts = signal("");
  readonly failure = signal<unknown>(null);
  /** The server forgot the answer before it was complete: it was restarted, or nobody read for too long. */
  readonly torn = signal(false);
  readonly live = signal<Live | null>(null);

  constructor(
    readonly key: string,
    readonly speaker: "user" | "assistant",
  ) {}

  /** What the server keeps of it is what counts. */
  adopt(turn: Turn): void {
    this.turn.value = turn.turn;
    this.at.value = turn.at;
    this.text.value = turn.text;
    if (turn.files) this.files.value = turn.files;
    if (turn.answer) {
      this.report.value = turn.answer;
      this.answerId.value = turn.answer.id;
      this.finish.value = turn.answer.finish_reason;
      this.usage.value = turn.answer.usage ?? this.usage.value;
      this.thoughts.value = turn.answer.reasoning ?? this.thoughts.value;
    }
  }
}

export function keptEntry(turn: Turn): Entry {
  const entry = new Entry(`turn-${turn.turn}`, turn.speaker);
  entry.adopt(turn);
  return entry;
}
