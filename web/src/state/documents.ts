/** Documents by id, kept up to date while the server reads them; and one that is on its way to the server. */
import { signal, type Signal } from "@preact/signals";
import { deleteFile, isGone, readFile, upload } from "../api/files";
import type { FileObject } from "../api/types";

export type Known = { state: "loading" } | { state: "known"; file: FileObject } | { state: "gone" };

const POLL_MS = 700;
const MAX_POLL_MS = 20_000;
const documents = new Map<string, Signal<Known>>();

/** A document as it is now. Asked for once, then again while it is being read. */
export function documentOf(id: string): Signal<Known> {
  let known = documents.get(id);
  if (!known) {
    known = signal<Known>({ state: "loading" });
    documents.set(id, known);
    void watch(id, known);
  }
  return known;
}

/** The same of a document that was just read of; it is asked for again only while the server reads it. */
export function knownDocument(file: FileObject): Signal<Known> {
  let known = documents.get(file.id);
  if (!known) {
    known = signal<Known>({ state: "known", file });
    documents.set(file.id, known);
    void watch(file.id, known);
  }
  return known;
}

export async function deleteDocument(id: string): Promise<void> {
  await deleteFile(id);
  const known = documents.get(id);
  if (known) known.value = { state: "gone" };
}

/** Asks until the document is read. A server that can't be reached, or that refuses, is asked less and less often. */
async function watch(id: string, known: Signal<Known>): Promise<void> {
  for (let failures = 0; ; ) {
    const now = known.peek();
    if (now.state === "gone" || (now.state === "known" && now.file.status !== "uploaded")) return;
    try {
      known.value = { state: "known", file: await readFile(id) };
      failures = 0;
    } catch (error) {
      if (isGone(error)) known.value = { state: "gone" };
      failures++;
    }
    const pause_ms = Math.min(MAX_POLL_MS, POLL_MS * 2 ** failures);
    await new Promise((resolve) => setTimeout(resolve, document.hidden ? 5 * pause_ms : pause_ms));
  }
}

let made = 0;

export class Attachment {
  /** Two files may have one name. */
  readonly key = made++;
  readonly sent = signal(0);
  readonly id = signal<string | null>(null);
  readonly failure = signal<unknown>(null);
  private readonly leaving = new AbortController();

  constructor(
    readonly name: string,
    file: File | null,
    id: string | null = null,
  ) {
    this.id.value = id;
    if (file) void this.send(file);
  }

  cancel(): void {
    this.leaving.abort();
  }

  private async send(file: File): Promise<void> {
    try {
      const stored = await upload(file, (share) => (this.sent.value = share), this.leaving.signal);
      knownDocument(stored);
      this.id.value = stored.id;
    } catch (error) {
      if (!this.leaving.signal.aborted) this.failure.value = error;
    }
  }
}
