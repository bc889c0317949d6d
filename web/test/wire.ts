/**
 * A server as the page hears it: `fetch` gives what a test says for a method and a path, and notes what was asked. The
 * page's clocks run faster meanwhile.
 */

const FASTER = 50;
const later = globalThis.setTimeout;

export interface Asked {
  method: string;
  path: string;
  body: unknown;
}

type Reply = Response | Promise<Response>;
type Replier = (asked: Asked, signal: AbortSignal | null) => Reply;

export class Wire {
  readonly asked: Asked[] = [];
  private readonly repliers: [method: string, path: RegExp, replier: Replier][] = [];

  constructor() {
    globalThis.fetch = ((path: string, init: RequestInit = {}) => this.reply(path, init)) as typeof fetch;
    globalThis.requestAnimationFrame = (run) => later(() => run(performance.now()), 0) as unknown as number;
    globalThis.setTimeout = ((run: () => void, ms = 0) => later(run, ms / FASTER)) as typeof setTimeout;
    const kept = new Map<string, string>();
    const storage = {
      getItem: (name: string) => kept.get(name) ?? null,
      setItem: (name: string, value: string) => void kept.set(name, value),
      removeItem: (name: string) => void kept.delete(name),
    };
    Object.defineProperty(globalThis, "sessionStorage", { value: storage, configurable: true });
    Object.defineProperty(globalThis, "location", { value: { hash: "" }, configurable: true });
    Object.defineProperty(globalThis, "history", { value: { pushState: () => {}, replaceState: () => {} }, configurable: true });
    Object.defineProperty(globalThis, "document", { value: { hidden: false }, configurable: true });
  }

  /** What is said from now on; the newest that fits counts. */
  on(method: string, path: RegExp, replier: Replier): void {
    this.repliers.unshift([method, path, replier]);
  }

  /** What was asked of a path. */
  of(method: string, path: RegExp): Asked[] {
    return this.asked.filter((each) => each.method === method && path.test(each.path));
  }

  private async reply(path: string, init: RequestInit): Promise<Response> {
    const body: unknown = typeof init.body === "string" ? JSON.parse(init.body) : null;
    const asked = { method: init.method ?? "GET", path, body };
    this.asked.push(asked);
    const found = this.repliers.find(([method, pattern]) => method === asked.method && pattern.test(path));
    if (!found) throw new TypeError(`nobody answers ${asked.method} ${path}`);
    init.signal?.throwIfAborted();
    return found[2](asked, init.signal ?? null);
  }

  /** A reply that never comes: it ends when whoever asked gives up. */
  static silent(_: Asked, signal: AbortSignal | null): Promise<Response> {
    return new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason as Error)));
  }
}

export function ok(body: unknown): Response {
  return new Response(JSON.stringify(body));
}

export function refused(status: number, code: string, message = code): Response {
  return new Response(JSON.stringify({ error: { message, code } }), { status });
}

/** A stream of events, numbered from `first` on. */
export function streamed(events: readonly unknown[], first = 0): Response {
  const wire = events.map((each, index) => `id: ${first + index}\ndata: ${typeof each === "string" ? each : JSON.stringify(each)}\n\n`);
  return new Response(wire.join(""));
}

/** The events of a whole answer. */
export function said(id: string, text: string): unknown[] {
  return [
    { id, choices: [{ delta: { content: text } }] },
    { id, choices: [{ delta: {}, finish_reason: "stop" }], perilune: { plan: "full" } },
    "[DONE]",
  ];
}

export async function until(what: () => boolean, within_ms = 3_000): Promise<void> {
  const end = performance.now() + within_ms;
  while (!what()) {
    if (performance.now() > end) throw new Error(`never: ${what}`);
    await moment(5);
  }
}

/** By the clock on the wall. */
export function moment(ms: number): Promise<void> {
  return new Promise((resolve) => later(resolve, ms));
}
