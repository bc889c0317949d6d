/** The keyboard's shortcuts: one table for the dialog that shows them and for the page that obeys them. */
import { focusComposer } from "../composer/Composer";
import { sidebarOpen } from "../state/sidebar";
import { families } from "../state/conversations";
import { closePanel, panel } from "../state/panel";
import { openConversation, route } from "../state/route";
import { threadOf } from "../state/threads";
import type { Key } from "../text";
import { dialog } from "./dialogs";

interface Shortcut {
  keys: readonly string[];
  does: Key;
  matches: (event: KeyboardEvent) => boolean;
  act: () => void;
}

const command = (event: KeyboardEvent) => event.ctrlKey || event.metaKey;

export const SHORTCUTS: readonly Shortcut[] = [
  { keys: ["Enter"], does: "shortcut.send", matches: () => false, act: () => undefined },
  { keys: ["Shift", "Enter"], does: "shortcut.line", matches: () => false, act: () => undefined },
  {
    keys: ["Esc"],
    does: "shortcut.stop",
    matches: (event) => event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open], :popover-open"),
    act: stopOrClose,
  },
  {
    keys: ["Ctrl", "K"],
    does: "shortcut.search",
    matches: (event) => command(event) && event.key.toLowerCase() === "k",
    act: () => {
      sidebarOpen.value = true;
      requestAnimationFrame(() => document.getElementById("search")?.focus());
    },
  },
  {
    keys: ["Ctrl", "Shift", "O"],
    does: "shortcut.new",
    matches: (event) => command(event) && event.shiftKey && event.key.toLowerCase() === "o",
    act: () => openConversation(null),
  },
  { keys: ["/"], does: "shortcut.question", matches: (event) => event.key === "/" && !typing(event), act: focusComposer },
  { keys: ["Alt", "↑"], does: "shortcut.before", matches: (event) => event.altKey && event.key === "ArrowUp", act: () => step(-1) },
  { keys: ["Alt", "↓"], does: "shortcut.after", matches: (event) => event.altKey && event.key === "ArrowDown", act: () => step(1) },
  { keys: ["?"], does: "shortcut.help", matches: (event) => event.key === "?" && !typing(event), act: () => (dialog.value = "shortcuts") },
];

function typing(event: KeyboardEvent): boolean {
  return event.target instanceof HTMLElement && event.target.matches("input, textarea, select, [contenteditable]");
}

function stopOrClose(): void {
  if (panel.value) return closePanel();
  const shown = route.peek();
  if (shown.view !== "chat" || shown.session === null) return;
  const thread = threadOf(shown.session);
  if (thread.answering.peek()) void thread.stop();
}

/** The conversation before or behind the one that is shown, as the sidebar has them. */
function step(by: number): void {
  const ids = families.peek().map((each) => each.members[0]?.id ?? each.root.id);
  const shown = route.peek();
  const at = shown.view === "chat" && shown.session !== null ? ids.indexOf(shown.session) : -1;
  const next = ids[Math.min(ids.length - 1, Math.max(0, at + by))];
  if (next) openConversation(next);
}

export function listenToKeys(): void {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented) return;
    const found = SHORTCUTS.find((each) => each.matches(event));
    if (!found) return;
    if (event.key !== "Escape") event.preventDefault();
    found.act();
  });
}
