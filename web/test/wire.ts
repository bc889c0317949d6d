/** A server as the page hears it: `fetch` gives what a test says for a method and a path, and notes what was asked. */

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
    globalThis.requestAnimationFrame = (run) => setTimeout(() => run(performance.now()), 0) as unknown as number;
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
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}
