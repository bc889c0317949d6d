/** Which view is open, as the address after # says. The server knows one page only. */
import { signal } from "@preact/signals";

export type Route =
  | { view: "chat"; session: string | null; turn: number | null }
  | { view: "memory" };

export function parseRoute(hash: string): Route {
  const [view, id, turn] = hash.replace(/^#\/?/, "").split("/");
  if (view === "memory") return { view: "memory" };
  if (view === "c" && id) {
    return { view: "chat", session: decoded(id), turn: turn && /^\d{1,9}$/.test(turn) ? Number(turn) : null };
  }
  return { view: "chat", session: null, turn: null };
}

function decoded(text: string): string | null {
  try {
    return decodeURIComponent(text);
  } catch {
    return null; // no address of ours
  }
}

export function addressOf(route: Route): string {
  if (route.view === "memory") return "#/memory";
  if (route.session === null) return "#/";
  return `#/c/${encodeURIComponent(route.session)}${route.turn === null ? "" : `/${route.turn}`}`;
}

export const route = signal<Route>({ view: "chat", session: null, turn: null });

export function followAddress(): void {
  const read = () => (route.value = parseRoute(location.hash));
  addEventListener("hashchange", read);
  read();
}

/** `replace`: without a step in the browser's history. */
export function go(to: Route, replace = false): void {
  const address = addressOf(to);
  if (replace) history.replaceState(null, "", address);
  else if (location.hash !== address) history.pushState(null, "", address);
  route.value = to;
}

export function openConversation(session: string | null, turn: number | null = null): void {
  go({ view: "chat", session, turn });
}

export function isOpen(session: string): boolean {
  const open = route.peek();
  return open.view === "chat" && open.session === session;
}
