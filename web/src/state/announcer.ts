/** What a screen reader is told as it happens: beginnings and ends, never the stream of an answer. */
import { signal } from "@preact/signals";

export const announcement = signal("");

export function announce(text: string): void {
  announcement.value = "";
  queueMicrotask(() => (announcement.value = text));
}
