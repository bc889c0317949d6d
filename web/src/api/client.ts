/** Calls to the server this page came from: the key, the two kinds of failure, and nothing of any one endpoint. */
import { effect, signal } from "@preact/signals";
import { readStored, writeStored } from "../state/stored";

/** The server said no. `message` is its own sentence, which says what to do. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** The server didn't answer at all. */
export class Unreachable extends Error {}

export const key = signal<string | null>(readStored("key", "session"));
effect(() => writeStored("key", key.value, "session"));

/** Set while a call waits for somebody to type the key; called with the key, or with null when they won't. */
export const keyWanted = signal<{ wrong: boolean; answer: (key: string | null) => void } | null>(null);

/** Whether the last call reached the server. */
export const online = signal(true);

let asking: Promise<string | null> | null = null;

/** Ask once, however many calls wait for it. */
function askForKey(): Promise<string | null> {
  asking ??= new Promise<string | null>((resolve) => {
    keyWanted.value = { wrong: key.value !== null, answer: resolve };
  }).then((given) => {
    key.value = given;
    keyWanted.value = null;
    asking = null;
    return given;
  });
  return asking;
}

export function authorised(headers: Record<string, string> = {}): Record<string, string> {
  return key.value === null ? headers : { ...headers, authorization: `Bearer ${key.value}` };
}

/** Throws `Refused`, `Unreachable`, and DOMException "AbortError" after an abort. Asks for a key where one is needed. */
export async function call(path: string, init: RequestInit & { headers?: Record<string, string> } = {}): Promise<Response> {
  const used = key.value;
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers: authorised(init.headers), cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    online.value = false;
    throw new Unreachable(String(error));
  }
  online.value = true;
  if (response.ok) return response;
  if (response.status === 401 && (key.value !== used || (await askForKey()) !== null)) return call(path, init);
  throw await refusal(response);
}

export async function json<T>(path: string, init: { method?: string; body?: unknown; signal?: AbortSignal } = {}): Promise<T> {
  const request: RequestInit & { headers?: Record<string, string> } = { method: init.method ?? "GET" };
  if (init.signal) request.signal = init.signal;
  if (init.body !== undefined) {
    request.body = JSON.stringify(init.body);
    request.headers = { "content-type": "application/json" };
  }
  return (await (await call(path, request)).json()) as T;
}

/** The error that a failed response tells of. */
export async function refusal(response: Response): Promise<Refused> {
  return refusedOf(response.status, await response.text());
}

export function refusedOf(status: number, body: string): Refused {
  try {
    const { error } = JSON.parse(body) as { error: { message: string; code?: string | null } };
    return new Refused(status, error.code ?? "", error.message);
  } catch {
    return new Refused(status, "", body.slice(0, 200) || `HTTP ${status}`);
  }
}
