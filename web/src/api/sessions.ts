/** Kept conversations. */
import { call, json } from "./client";
import type { Hit, Session, SessionPage, Turn } from "./types";

const PAGE = 1000;

function path(id: string): string {
  return `/v1/sessions/${encodeURIComponent(id)}`;
}

/** All of them, the newest first. */
export async function listSessions(): Promise<Session[]> {
  const found: Session[] = [];
  let cursor: string | null = null;
  do {
    const query: string = cursor === null ? "" : `&cursor=${encodeURIComponent(cursor)}`;
    const page: { data: Session[]; has_more: boolean; next_cursor?: string | null } = await json(
      `/v1/sessions?limit=${PAGE}${query}`,
    );
    found.push(...page.data);
    cursor = page.has_more ? (page.next_cursor ?? null) : null;
  } while (cursor !== null);
  return found;
}

/** A conversation with all its turns behind number `after`. */
export async function readSession(id: string, after = 0): Promise<{ session: Session; turns: Turn[] }> {
  const turns: Turn[] = [];
  for (;;) {
    const page = await json<SessionPage>(`${path(id)}?after=${turns.at(-1)?.turn ?? after}&limit=${PAGE}`);
    turns.push(...page.data);
    if (!page.has_more || page.data.length === 0) return { session: page, turns };
  }
}

/** One turn; null where there is none. */
export async function readTurn(id: string, turn: number): Promise<Turn | null> {
  const page = await json<SessionPage>(`${path(id)}?after=${turn - 1}&limit=1`);
  return page.data[0] ?? null;
}

export function renameSession(id: string, title: string | null): Promise<Session> {
  return json(path(id), { method: "PATCH", body: { title } });
}

export function deleteSession(id: string): Promise<unknown> {
  return json(path(id), { method: "DELETE" });
}

/** A new conversation that holds turns 1 to `turn` of another one. */
export function forkSession(id: string, turn: number): Promise<Session> {
  return json(`${path(id)}/fork`, { method: "POST", body: { turn } });
}

export async function exportSession(id: string, format: "markdown" | "json"): Promise<Blob> {
  return (await call(`${path(id)}?format=${format}`)).blob();
}

/** The best turns and passages for a question, in everything that is kept. */
export async function search(query: string, signal: AbortSignal): Promise<Hit[]> {
  const found = await json<{ data: Hit[] }>("/v1/memory/search", { method: "POST", body: { query, limit: 20 }, signal });
  return found.data;
}
