/** The list of kept conversations, and how they branch. */
import { computed, signal } from "@preact/signals";
import { listSessions, renameSession } from "../api/sessions";
import type { Session } from "../api/types";

export const sessions = signal<readonly Session[] | null>(null);
export const listFailure = signal<unknown>(null);

export async function loadSessions(): Promise<void> {
  try {
    sessions.value = await listSessions();
    listFailure.value = null;
  } catch (error) {
    listFailure.value = error;
  }
}

export function sessionOf(id: string | null): Session | undefined {
  return sessions.value?.find((each) => each.id === id);
}

/** Put one in, or in the place of what was known of it. */
export function noteSession(session: Session): void {
  const others = (sessions.value ?? []).filter((each) => each.id !== session.id);
  sessions.value = [session, ...others].sort((a, b) => b.updated_at - a.updated_at);
}

export async function rename(id: string, title: string): Promise<void> {
  noteSession({ ...sessionOf(id), ...(await renameSession(id, title.trim() || null)) });
}

/** It was deleted; its branches stay, and begin anew. */
export function forgetSession(id: string): void {
  const left = (sessions.value ?? []).filter((each) => each.id !== id);
  sessions.value = left.map((each) => (each.parent?.session === id ? { ...each, parent: null } : each));
}

// ------------------------------------------------------------------------------------------- branches

type Known = ReadonlyMap<string, Session>;

function byId(all: readonly Session[]): Known {
  return new Map(all.map((each) => [each.id, each]));
}

/** From a conversation up to the one that it began as. */
function chain(known: Known, session: Session): Session[] {
  const found = [session];
  for (let at = session; at.parent; ) {
    const parent = known.get(at.parent.session);
    if (!parent || found.includes(parent)) break;
    found.push(parent);
    at = parent;
  }
  return found;
}

/** The conversation in which turn `turn` of `session` was said first: a branch's early turns are its parent's. */
export function originOf(all: readonly Session[], session: Session, turn: number): Session {
  const known = byId(all);
  return chain(known, session).find((each) => each.parent === null || turn > each.parent.turn || !known.has(each.parent.session)) ?? session;
}

export interface Versions {
  /** The conversations in which something else follows the same beginning, the oldest first. */
  all: Session[];
  current: number;
}

/** The versions of what follows behind turn `after`; null where there is only one. */
export function versionsAfter(all: readonly Session[], session: Session, after: number): Versions | null {
  const path = chain(byId(all), session);
  const forks = (of: Session) => all.filter(
      (each) => each.parent?.session === of.id && each.parent.turn === after && (each.turns > after || path.includes(each)),
    );
  const base = path.find((each) => forks(each).length > 0);
  if (!base) return null;
  const branches = forks(base).sort((a, b) => a.created_at - b.created_at);
  const versions = base.turns > after || base.id === session.id ? [base, ...branches] : branches;
  const current = versions.findIndex((each) => path.includes(each) && (each !== base || !branches.some((b) => path.includes(b))));
  return versions.length > 1 && current >= 0 ? { all: versions, current } : null;
}

export interface Family {
  root: Session;
  /** The newest first; the root is among them. */
  members: Session[];
}

/** Conversations with their branches, the one that was used last first. */
export function familiesOf(all: readonly Session[]): Family[] {
  const known = byId(all);
  const families = new Map<string, Family>();
  for (const session of [...all].sort((a, b) => b.updated_at - a.updated_at)) {
    const root = chain(known, session).at(-1) ?? session;
    const family = families.get(root.id) ?? { root, members: [] };
    family.members.push(session);
    families.set(root.id, family);
  }
  return [...families.values()];
}

export const families = computed(() => familiesOf(sessions.value ?? []));
