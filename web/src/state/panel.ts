/** What the source panel beside the conversation shows: a page of a document or an earlier turn. */
import { signal } from "@preact/signals";
import type { Citation } from "../api/types";

/** Which question and answer led there: a better place that is marked in the panel is told to the server with them. */
export interface Origin {
  question: string;
  answer: string;
  answerId: string | null;
  session: string;
}

export type Panel =
  | { kind: "page"; fileId: string; filename: string; page: number; mark: { start: number; end: number } | null; origin: Origin | null }
  | { kind: "turn"; session: string; turn: number; quote: string; origin: Origin | null };

export const panel = signal<Panel | null>(null);

let opener: HTMLElement | null = null;

export function openPanel(shown: Panel): void {
  if (panel.peek() === null) opener = document.activeElement as HTMLElement | null;
  panel.value = shown;
}

export function openCitation(citation: Citation, origin: Origin | null): void {
  if ("session" in citation) {
    openPanel({ kind: "turn", session: citation.session, turn: citation.turn, quote: citation.quote, origin });
  } else {
    const mark = { start: citation.start, end: citation.end };
    openPanel({ kind: "page", fileId: citation.file_id, filename: citation.filename, page: citation.page, mark, origin });
  }
}

/** The focus goes back to where the panel was opened from. */
export function closePanel(): void {
  panel.value = null;
  if (opener?.isConnected) opener.focus();
  opener = null;
}
