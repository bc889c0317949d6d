/** Asking: one streamed answer, which goes on after a dropped connection. Knows the dialect, not what is shown of it. */
import { authorised, call, json, online, Refused, refusedOf, Unreachable } from "./client";
import { eventsOf, type StreamEvent } from "./eventStream";
import type { Citation, Degradation, FinishReason, Plan, Report, Usage } from "./types";

export interface Planned {
  plan: Plan;
  deadline_s: number;
  predicted_ttft_s: number;
  context_tokens: number;
  degradations: Degradation[];
}

export type Stage = "retrieving" | "composing" | "queued" | "prefilling" | "answering";

export type AnswerEvent =
  | { kind: "opened"; id: string }
  | { kind: "alive" }
  | { kind: "stage"; stage: Stage }
  | { kind: "planned"; planned: Planned }
  | { kind: "prefilling"; processed: number; total: number; eta_s: number }
  | { kind: "citation"; citation: Citation }
  | { kind: "text"; text: string }
  | { kind: "finished"; reason: FinishReason; report: Report }
  | { kind: "usage"; usage: Usage }
  | { kind: "reconnecting" };

export type Part = { type: "text"; text: string } | { type: "file"; file: { file_id: string } };

export interface Message {
  role: "user" | "assistant";
  content: string | Part[];
}

export interface Ask {
  model: string;
  session: string;
  messages: Message[];
  deadline_s?: number;
  context_policy?: "full";
  profile: boolean;
  temperature?: number;
  seed?: number;
}

/** The server doesn't know the answer any more: it was restarted, or the page was away for too long. */
export class AnswerLost extends Error {}

/** A connection without a byte for so long is broken: the server is never silent for more than a second. */
const SILENCE_S = 20;
const RETRY_S = [0.3, 0.7, 1, 1.5, 2];
const GIVE_UP_S = 180;

/** Ask, and give what comes. Throws `Refused`, `Unreachable` (never begun), `AnswerLost`, or AbortError. */
export async function* answer(ask: Ask, signal: AbortSignal): AsyncGenerator<AnswerEvent> {
  const body = { ...ask, stream: true, stream_options: { include_usage: true, include_progress: true, resumable: true } };
  const response = await call("/v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
    signal,
  });
  yield* follow(response, null, -1, signal);
}

/** Read an answer that began elsewhere (before a reload), from its beginning. */
export async function* rejoin(id: string, signal: AbortSignal): AsyncGenerator<AnswerEvent> {
  const response = await reopened(id, -1, signal);
  yield* follow(response, id, -1, signal);
}

/** The server stops working on it, and keeps what was said. */
export async function stop(id: string): Promise<void> {
  await json(`/v1/chat/completions/${encodeURIComponent(id)}`, { method: "DELETE" });
}

async function* follow(
  first: Response,
  known: string | null,
  after: number,
  signal: AbortSignal,
): AsyncGenerator<AnswerEvent> {
  let response = first;
  let id = known;
  let last = after;
  for (;;) {
    try {
      for await (const event of eventsOf(response, SILENCE_S)) {
        if (event !== "comment" && event.data === "[DONE]") return;
        if (event !== "comment" && event.id !== null) last = event.id;
        for (const told of toldBy(event)) {
          if (told.kind === "opened") {
            if (id === told.id) continue;
            id = told.id;
          }
          yield told;
        }
      }
    } catch (error) {
      if (signal.aborted || error instanceof Refused) throw error;
    }
    // The connection ended before the answer did.
    if (id === null) throw new Unreachable("The connection was lost before the answer began.");
    yield { kind: "reconnecting" };
    response = await reopened(id, last, signal);
  }
}

/** The rest of a stream, as soon as the server can be reached. Throws `AnswerLost` where it doesn't have it. */
async function reopened(id: string, after: number, signal: AbortSignal): Promise<Response> {
  const path = `/v1/chat/completions/${encodeURIComponent(id)}${after >= 0 ? `?starting_after=${after}` : ""}`;
  const start = performance.now();
  for (let attempt = 0; performance.now() - start < 1000 * GIVE_UP_S; attempt++) {
    try {
      const response = await fetch(path, { headers: authorised(), signal, cache: "no-store" });
      if (response.ok) {
        online.value = true;
        return response;
      }
      const refused = refusedOf(response.status, await response.text());
      if (response.status !== 503) {
        online.value = true;
        throw response.status === 404 || response.status === 409 ? new AnswerLost(refused.message) : refused;
      }
    } catch (error) {
      if (signal.aborted || error instanceof AnswerLost || error instanceof Refused) throw error;
      online.value = false;
    }
    await pause(RETRY_S[Math.min(attempt, RETRY_S.length - 1)] ?? 2, signal);
  }
  throw new AnswerLost("The server could not be reached for three minutes.");
}

function pause(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason as Error)), { once: true });
  });
}

interface Chunk {
  id?: string;
  error?: { message: string; code?: string };
  choices?: { delta?: { content?: string | null }; finish_reason?: FinishReason | null }[];
  usage?: Usage | null;
  perilune?: Report & { stage?: string; citation?: Citation } & Partial<Planned> & {
      processed?: number;
      total?: number;
      eta_s?: number;
    };
}

/** What one event of the stream says. Throws `Refused` for an error that came after the stream began. */
export function toldBy(event: StreamEvent): AnswerEvent[] {
  if (event === "comment") return [{ kind: "alive" }];
  const chunk = JSON.parse(event.data) as Chunk;
  if (chunk.error) throw new Refused(200, chunk.error.code ?? "", chunk.error.message);
  const told: AnswerEvent[] = [];
  if (chunk.id) told.push({ kind: "opened", id: chunk.id });
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) told.push({ kind: "text", text: choice.delta.content });
  if (choice?.finish_reason) told.push({ kind: "finished", reason: choice.finish_reason, report: chunk.perilune ?? {} });
  else if (chunk.perilune) told.push(...progressOf(chunk.perilune));
  if (chunk.usage) told.push({ kind: "usage", usage: chunk.usage });
  return told;
}

function progressOf(progress: NonNullable<Chunk["perilune"]>): AnswerEvent[] {
  switch (progress.stage) {
    case "planned":
      return [{ kind: "planned", planned: progress as Planned }];
    case "citation":
      return progress.citation ? [{ kind: "citation", citation: progress.citation }] : [];
    case "prefilling":
      if (progress.total === undefined) return [{ kind: "stage", stage: "prefilling" }];
      return [
        { kind: "prefilling", processed: progress.processed ?? 0, total: progress.total, eta_s: progress.eta_s ?? 0 },
      ];
    case "retrieving":
    case "composing":
    case "queued":
    case "answering":
      return [{ kind: "stage", stage: progress.stage }];
    default:
      return []; // a stage of a newer server
  }
}
