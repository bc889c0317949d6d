/** Server-sent events out of a response's bytes. Comments are told too: they are the server's heartbeat. */

export type StreamEvent = { id: number | null; data: string } | "comment";

/** Collects bytes; `push` gives the events that are complete. Lines end with LF or CRLF. */
export class EventParser {
  private rest = "";
  private id: number | null = null;
  private data: string[] = [];
  private readonly decoder = new TextDecoder();

  push(bytes: Uint8Array): StreamEvent[] {
    const text = this.rest + this.decoder.decode(bytes, { stream: true });
    const lines = text.split("\n");
    this.rest = lines.pop() ?? "";
    const events: StreamEvent[] = [];
    for (const line of lines) this.line(line.endsWith("\r") ? line.slice(0, -1) : line, events);
    return events;
  }

  private line(line: string, events: StreamEvent[]): void {
    if (line === "") {
      if (this.data.length > 0) events.push({ id: this.id, data: this.data.join("\n") });
      this.data = [];
    } else if (line.startsWith(":")) {
      events.push("comment");
    } else if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    } else if (line.startsWith("id:")) {
      const id = Number(line.slice(3));
      this.id = Number.isInteger(id) ? id : null;
    }
  }
}

/** The events of a response. Throws what reading throws; `silence_s` without a byte counts as a broken connection. */
export async function* eventsOf(response: Response, silence_s: number): AsyncGenerator<StreamEvent> {
  if (!response.body) return;
  const reader = response.body.getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await withinSilence(reader.read(), silence_s);
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    void reader.cancel().catch(() => undefined); // it may be broken already
  }
}

async function withinSilence<T>(reading: Promise<T>, silence_s: number): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const silence = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new TypeError("The connection is silent.")), 1000 * silence_s);
  });
  try {
    return await Promise.race([reading, silence]);
  } finally {
    clearTimeout(timer);
  }
}
