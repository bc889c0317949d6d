/** Asking: one streamed answer, which goes on after a dropped connection. Knows the dialect, not what is shown of it. */
import { call, reach, Refused, refusal, Unreachable } from "./client";
import { eventsOf, type StreamEvent } from "./eventStream";
import type { Citation, Degradation, FinishReason, Plan, Report, Usage } from "./types";

export interface Planned {
  plan: Plan;
  deadline_s: number;
  predicted_ttft_s: number;
  context_tokens: number;
  degradations: Degradation[];
}

export type Stage = "searching" | "retrieving" | "composing" | "queued" | "prefilling" | "answering";

export type AnswerEvent =
  | { kind: "opened"; id: string }
  | { kind: "alive" }
  | { kind: "stage"; stage: Stage }
  | { kind: "planned"; planned: Planned }
  | { kind: "prefilling"; processed: number; total: number; eta_s: number }
  | { kind: "citation"; citation: Citation }
  | { kind: "thought"; text: string }
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
  max_tokens: number;
  deadline_s?: number;
  context_policy?: "full";
  profile: boolean;
  temperature?: number;
  seed?: number;
}

/** The server doesn't know the answer any more: it was restarted, or the page was away for too long. */
export class AnswerLost extends Error {}

/** The server begins a stream within a second, whatever it has to do for it. */
const HEAD_LIMIT_S = 30;
/** Whoever presses Stop waits no longer for a server that doesn't answer. */
const STOP_LIMIT_S = 3;
/** A connection without a byte for so long is broken: the server is never silent for more than a second. */
const SILENCE_S = 20;
const RETRY_S = [0.3, 0.7, 1, 1.5, 2];
const GIVE_UP_S = 180;
/** Connections that end at once, one behind the other, and bring nothing new. */
const MAX_FRUITLESS = 6;
const FRUITLESS_S = 5;

/** Ask, and give what comes. Throws `Refused`, `Unreachable` (never begun, or gone for too long), `AnswerLost`, AbortError. */
export async function* answer(ask: Ask, signal: AbortSignal): AsyncGenerator<AnswerEvent> {
  const body = { ...ask, stream: true, stream_options: { include_usage: true, include_progress: true, resumable: true } };
  const headers = { "content-type": "application/json" };
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal }, HEAD_LIMIT_S);
  yield* follow(response, null, -1, signal);
}

/** Read an answer that began elsewhere (before a reload), from its beginning. */
export async function* rejoin(id: string, signal: AbortSignal): AsyncGenerator<AnswerEvent> {
  const response = await reopened(id, -1, signal);
  yield* follow(response, id, -1, signal);
}

/** The server stops working on it, and keeps what was said. */
export async function stop(id: string): Promise<void> {
  await call(`/v1/chat/completions/${encodeURIComponent(id)}`, { method: "DELETE" }, STOP_LIMIT_S);
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
  for (let fruitless = 0; ; ) {
    const [lastBefore, openedAt] = [last, performance.now()];
    let stopping: Refused | null = null;
    try {
      for await (const event of eventsOf(response, SILENCE_S)) {
        if (event !== "comment" && event.data === "[DONE]") return;
        for (const told of toldBy(event)) {
          if (told.kind === "opened") {
            if (id === told.id) continue;
            id = told.id;
          }
          yield told;
        }
        if (event !== "comment" && event.id !== null) last = event.id;
      }
    } catch (error) {
      if (signal.aborted) throw error;
      if (error instanceof Refused) {
        if (id === null || error.code !== "overloaded") throw error;
        stopping = error; // as a server says goodbye before it is restarted; or it is the answer's end: the next look tells
      }
    }
    // The connection ended before the answer did, or brought what can't be read.
    if (id === null) throw new Unreachable("The connection was lost before the answer began.");
    fruitless = last > lastBefore || performance.now() - openedAt > 1000 * FRUITLESS_S ? 0 : fruitless + 1;
    if (fruitless > MAX_FRUITLESS) throw stopping ?? new Refused(200, "answer_broken", "");
    yield { kind: "reconnecting" };
    if (fruitless > 0) await pause(retryAfter_s(fruitless - 1), signal);
    response = await reopened(id, last, signal, stopping);
  }
}

/**
 * The rest of a stream, as soon as the server can be reached. Throws `AnswerLost` where it doesn't have it, `Unreachable`
 * after `GIVE_UP_S`, and `Refused`, also where it only says once more what it `said`.
 */
async function reopened(id: string, after: number, signal: AbortSignal, said: Refused | null = null): Promise<Response> {
  const path = `/v1/chat/completions/${encodeURIComponent(id)}${after >= 0 ? `?starting_after=${after}` : ""}`;
  const start = performance.now();
  for (let attempt = 0; performance.now() - start < 1000 * GIVE_UP_S; attempt++) {
    try {
      const response = await reach(path, { signal }, HEAD_LIMIT_S);
      if (response.ok) return response;
      const refused = await refusal(response);
      if (refused.status === 404 || refused.status === 409) throw new AnswerLost(refused.message);
      if (!isPassing(refused) || refused.message === said?.message) throw refused;
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
    }
    await pause(retryAfter_s(attempt), signal);
  }
  throw new Unreachable("The server could not be reached for three minutes.");
}

/** A server that starts or stops, or a proxy that stands before one; not what a server says of an answer. */
function isPassing(refused: Refused): boolean {
  return refused.status === 503 || (refused.code === "" && (refused.status === 502 || refused.status === 504));
}

function retryAfter_s(attempt: number): number {
  return RETRY_S[Math.min(attempt, RETRY_S.length - 1)] ?? 2;
}

function pause(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal.aborted) return reject(signal.reason as Error);
    const leave = () => (clearTimeout(timer), reject(signal.reason as Error));
    const timer = setTimeout(() => (signal.removeEventListener("abort", leave), resolve()), 1000 * seconds);
    signal.addEventListener("abort", leave, { once: true });
  });
}

interface Chunk {
  id?: string;
  error?: { message: string; code?: string };
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null }; finish_reason?: FinishReason | null }[];
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
  if (choice?.delta?.reasoning_content) told.push({ kind: "thought", text: choice.delta.reasoning_content });
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
    case "searching":
    case "retrieving":
    case "composing":
    case "queued":
    case "answering":
      return [{ kind: "stage", stage: progress.stage }];
    default:
      return []; // a stage of a newer server
  }
}
