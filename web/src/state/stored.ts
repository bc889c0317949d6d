/** What this browser remembers of the page: choices, never conversations. A browser that forbids storage forgets. */

const PREFIX = "perilune.";

export function readStored(name: string, from: "local" | "session" = "local"): string | null {
  try {
    return storage(from).getItem(PREFIX + name);
  } catch {
    return null; // storage is forbidden here
  }
}

/** `null` forgets. */
export function writeStored(name: string, value: string | null, to: "local" | "session" = "local"): void {
  try {
    if (value === null) storage(to).removeItem(PREFIX + name);
    else storage(to).setItem(PREFIX + name, value);
  } catch {
    // Forbidden or full: the choice lasts until the page is left.
  }
}

function storage(which: "local" | "session"): Storage {
  return which === "local" ? localStorage : sessionStorage;
}
