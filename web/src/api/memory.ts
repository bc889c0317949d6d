/** What the server knows of the user, the summaries it keeps, what the user thinks of answers, and the machine. */
import { call, json } from "./client";
import type { Feedback, Machine, ProfileFact, SummarySentence } from "./types";

export async function readProfile(history: boolean): Promise<ProfileFact[]> {
  return (await json<{ data: ProfileFact[] }>(`/v1/memory/profile${history ? "?history=true" : ""}`)).data;
}

/** Set facts by hand; null erases one. */
export function editProfile(facts: Record<string, string | null>): Promise<unknown> {
  return json("/v1/memory/profile", { method: "PATCH", body: { facts } });
}

/** Erase one fact with its history, or all. */
export function eraseProfile(key: string | null): Promise<unknown> {
  return json(`/v1/memory/profile${key === null ? "" : `?key=${encodeURIComponent(key)}`}`, { method: "DELETE" });
}

export async function readSummary(session: string): Promise<SummarySentence[]> {
  return (await json<{ data: SummarySentence[] }>(`/v1/memory/summary?session=${encodeURIComponent(session)}`)).data;
}

/** Rewrite a sentence; an empty text strikes it out, null takes the correction back. */
export function correctSummary(session: string, turn: number, start: number, text: string | null): Promise<unknown> {
  return json("/v1/memory/summary", { method: "PATCH", body: { session, turn, start, text } });
}

/** Everything kept about the user, as JSON Lines. */
export async function exportMemory(): Promise<Blob> {
  return (await call("/v1/memory/export")).blob();
}

export function giveFeedback(feedback: Feedback): Promise<{ id: string }> {
  return json("/v1/feedback", { method: "POST", body: feedback });
}

export async function readFeedback(session: string): Promise<(Feedback & { id: string })[]> {
  const path = `/v1/feedback?limit=100&session=${encodeURIComponent(session)}`;
  return (await json<{ data: (Feedback & { id: string })[] }>(path)).data;
}

export function takeBackFeedback(id: string): Promise<unknown> {
  return json(`/v1/feedback/${encodeURIComponent(id)}`, { method: "DELETE" });
}

export function readMachine(): Promise<Machine> {
  return json("/v1/machine");
}

export async function readModels(): Promise<{ id: string; max_model_len: number }[]> {
  return (await json<{ data: { id: string; max_model_len: number }[] }>("/v1/models")).data;
}
