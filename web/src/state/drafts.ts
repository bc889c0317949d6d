/** What is written and attached for the next question, of each conversation apart. A reload of the tab finds it again. */
import { computed, effect, signal } from "@preact/signals";
import { Attachment } from "./documents";
import { route } from "./route";
import { readStored, writeStored } from "./stored";

interface Kept {
  text: string;
  files: { id: string; name: string }[];
}

export class Draft {
  readonly text = signal("");
  readonly attachments = signal<readonly Attachment[]>([]);

  constructor(private readonly name: string) {
    const kept = read(name);
    this.text.value = kept.text;
    this.attachments.value = kept.files.map((each) => new Attachment(each.name, null, each.id));
    effect(() => this.keep());
  }

  attach(files: Iterable<File>): void {
    this.attachments.value = [...this.attachments.peek(), ...Array.from(files, (file) => new Attachment(file.name, file))];
  }

  /** Attach a document that the server has already. */
  attachKnown(id: string, name: string): void {
    if (this.attachments.peek().some((each) => each.id.peek() === id)) return;
    this.attachments.value = [...this.attachments.peek(), new Attachment(name, null, id)];
  }

  detach(attachment: Attachment): void {
    attachment.cancel();
    this.attachments.value = this.attachments.peek().filter((each) => each !== attachment);
  }

  clear(): void {
    this.text.value = "";
    this.attachments.value = [];
  }

  private keep(): void {
    const files = this.attachments.value.flatMap(({ id, name }) => (id.value === null ? [] : [{ id: id.value, name }]));
    const kept: Kept = { text: this.text.value, files };
    writeStored(this.name, kept.text === "" && files.length === 0 ? null : JSON.stringify(kept), "session");
  }
}

function read(name: string): Kept {
  try {
    return JSON.parse(readStored(name, "session") ?? "") as Kept;
  } catch {
    return { text: "", files: [] }; // nothing was kept, or another version of the page kept it
  }
}

const drafts = new Map<string, Draft>();

/** The draft of a conversation; `null` is one that hasn't begun. */
export function draftOf(session: string | null): Draft {
  const name = session === null ? "draft" : `draft.${session}`;
  let draft = drafts.get(name);
  if (!draft) drafts.set(name, (draft = new Draft(name)));
  return draft;
}

/** The draft of what is shown. */
export const openDraft = computed(() => draftOf(route.value.view === "chat" ? route.value.session : null));
