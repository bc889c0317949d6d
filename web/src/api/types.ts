/** The wire, as docs/api.md and docs/perilune-object.md have it; only what the page reads. Times are seconds since 1970. */

export type Plan = "warm" | "resume" | "full" | "refined" | "cached" | "fallback";

/** A passage of a file. Offsets are code points of the file's whole text. */
export interface FileCitation {
  file_id: string;
  filename: string;
  page: number;
  start: number;
  end: number;
  quote: string;
  gone?: boolean;
}

/** An earlier turn of a conversation. */
export interface TurnCitation {
  session: string;
  turn: number;
  speaker: string;
  at: number | null;
  quote: string;
  gone?: boolean;
}

export type Citation = FileCitation | TurnCitation;

export interface Degradation {
  code: string;
  reason: string;
}

export interface TokenCounts {
  offered: number;
  exact: number;
  estimated: number;
  summarised: number;
  dropped: number;
  cached: { ram: number; disk: number };
}

export interface UsedMemory {
  profile: { key: string; value: string; session: string | null; turn: number | null }[];
  summary: { session: string; turn: number; quote: string; corrected: boolean }[];
}

/** The `perilune` object: what was done to answer. Of an interrupted answer most of it is missing. */
export interface Report {
  plan?: Plan;
  deadline_s?: number;
  predicted_ttft_s?: number;
  measured_ttft_s?: number | null;
  tokens?: TokenCounts;
  model?: string;
  backend?: string;
  citations?: Citation[];
  degradations?: Degradation[];
  attempts?: { backend: string; model: string; outcome: string; seconds: number }[];
  taken_out?: Record<string, number>;
  answer_cache?: { kind: string; age_s: number; question: string } | null;
  cost?: number | null;
  memory?: UsedMemory;
  confidence?: number | null;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens?: number;
}

export type FinishReason = "stop" | "length" | "tool_calls" | "cancelled" | "error";

/** What is kept of an answer. */
export interface KeptAnswer extends Report {
  id: string;
  finish_reason: FinishReason;
  usage?: Usage | null;
  total_s?: number;
  /** What the model thought before it answered. */
  reasoning?: string;
}

export interface Session {
  id: string;
  title: string | null;
  turns: number;
  created_at: number;
  updated_at: number;
  parent: { session: string; turn: number } | null;
}

export interface Turn {
  session: string;
  turn: number;
  speaker: "user" | "assistant";
  at: number;
  text: string;
  files?: string[];
  answer?: KeptAnswer | null;
}

export interface SessionPage extends Session {
  data: Turn[];
  has_more: boolean;
}

export interface FileObject {
  id: string;
  bytes: number;
  created_at: number;
  filename: string;
  status: "uploaded" | "processed" | "error";
  status_details: string | null;
  perilune: {
    status: "uploaded" | "parsing" | "prefilling" | "processed" | "error";
    error_code: string | null;
    pages_total: number | null;
    pages_parsed: number | null;
    tokens: number | null;
    language: string | null;
  };
}

/** One page of a file; `start` and `end` are its place in the whole text, in code points. */
export interface FilePage {
  file_id: string;
  filename: string;
  page: number;
  pages: number;
  start: number;
  end: number;
  text: string;
  image: boolean;
}

export interface FoundTurn extends Turn {
  object: "session.turn";
}

export interface FoundPassage {
  object: "file.passage";
  file_id: string;
  page: number;
  start: number;
  end: number;
  text: string;
}

export type Hit = FoundTurn | FoundPassage;

export interface ProfileFact {
  key: string;
  value: string;
  since: number;
  until: number | null;
  session: string | null;
  turn: number | null;
}

export interface SummarySentence {
  turn?: number;
  page?: number;
  start: number;
  end: number;
  text: string;
  corrected: boolean;
}

export interface Machine {
  model?: { id?: string; window_tokens?: number; bytes?: number; licence?: string };
  memory?: { total_bytes?: number; free_bytes?: number; model_bytes?: number; kv_bytes?: number };
  cores?: number;
  rates?: {
    measured?: boolean;
    prefill_tokens_per_s?: number | null;
    decode_tokens_per_s?: number | null;
    tokens_within_deadline?: number | null;
  };
  fit?: "ok" | "tight" | "too_big";
  checks?: { name: string; state: "ok" | "warning" | "failed"; detail: string; fix: string | null }[];
  version?: string;
}

export type FeedbackReason =
  | "incorrect"
  | "incomplete"
  | "not_found"
  | "wrong_source"
  | "off_topic"
  | "style"
  | "slow"
  | "unsafe"
  | "other";

export type Span =
  | { file_id: string; page?: number; start: number; end: number }
  | { session: string; turn: number; start?: number; end?: number };

export interface Feedback {
  answer_id: string;
  rating: "up" | "down";
  reason?: FeedbackReason | null;
  comment?: string | null;
  span?: Span | null;
}

export function isTurnCitation(citation: Citation): citation is TurnCitation {
  return "session" in citation;
}
