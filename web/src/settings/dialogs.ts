/** Which of the page's own dialogs is open. */
import { signal } from "@preact/signals";

export const dialog = signal<"settings" | "shortcuts" | null>(null);
