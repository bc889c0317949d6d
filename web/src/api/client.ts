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
let declined = false;

/** Ask once, however many calls wait for it. Who declined is asked again only by a button that they press. */
export function askForKey(): Promise<string | null> {
  asking ??= new Promise<string | null>((resolve) => {
    keyWanted.value = { wrong: key.value !== null, answer: resolve };
  }).then((given) => {
    declined = given === null;
    key.value = given;
    keyWanted.value = null;
    asking = null;
    return given;
  });
  return asking;
}

/** Whether there is another key than the one that a call was refused with; somebody may be asked for it. */
async function otherKey(used: string | null): Promise<boolean> {
  if (key.value !== used) return true;
  if (declined && key.value === null) return false;
  return (await askForKey()) !== null;
}

export function authorised(headers: Record<string, string> = {}): Record<string, string> {
  return key.value === null ? headers : { ...headers, authorization: `Bearer ${key.value}` };
}

type Init = RequestInit & { headers?: Record<string, string> };

/** A server that says nothing for so long after it was asked is as good as gone. */
const HEAD_LIMIT_S = 60;

/** The head of the response; its body may take its time. Throws `Unreachable`, and what `init.signal` was aborted with. */
export async function reach(path: string, init: Init, limit_s = HEAD_LIMIT_S): Promise<Response> {
  const { signal } = init;
  const giveUp = new AbortController();
  const follow = () => giveUp.abort(signal?.reason);
  if (signal?.aborted) follow();
  signal?.addEventListener("abort", follow, { once: true });
  const timer = setTimeout(() => giveUp.abort(new Error(`no answer within ${limit_s} s`)), 1000 * limit_s);
  try {
    const response = await fetch(path, { ...init, headers: authorised(init.headers), cache: "no-store", signal: giveUp.signal });
    online.value = true;
    return response;
  } catch (error) {
    signal?.removeEventListener("abort", follow);
    if (signal?.aborted) throw error;
    online.value = false;
    throw new Unreachable(String(error));
  } finally {
    clearTimeout(timer);
  }
}

/** Throws `Refused`, `Unreachable`, and DOMException "AbortError" after an abort. Asks for a key where one is needed. */
export async function call(path: string, init: Init = {}, limit_s = HEAD_LIMIT_S): Promise<Response> {
  const used = key.value;
  const response = await reach(path, init, limit_s);
  if (response.ok) return response;
  if (response.status === 401 && (await otherKey(used))) return call(path, init, limit_s);
  throw await refusal(response);
}

export async function json<T>(path: string, init: { method?: string; body?: unknown; signal?: AbortSignal } = {}): Promise<T> {
  const request: Init = { method: init.method ?? "GET" };
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
