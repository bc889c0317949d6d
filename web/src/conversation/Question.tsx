/** What somebody asked: its text, its documents, and how to ask it otherwise. */
import { useRef, useState, useEffect } from "preact/hooks";
import { Button, HiddenText, IconButton } from "../design/controls";
import { Copy } from "../design/Copy";
import { DocumentChip } from "../composer/AttachmentChip";
import { Long } from "../markdown/Long";
import { branching, editQuestion } from "../state/actions";
import { attempt } from "../state/attempt";
import type { Entry } from "../state/entry";
import type { Thread } from "../state/thread";
import { fullMoment, t } from "../text";
import { VersionSwitch } from "./VersionSwitch";
import styles from "./conversation.module.css";

const LONG_CHARS = 3_000;

export function Question({ entry, thread }: { entry: Entry; thread: Thread }) {
  const [editing, setEditing] = useState(false);
  const text = entry.text.value;
  const turn = entry.turn.value;
  if (editing) return <Editor entry={entry} thread={thread} onClose={() => setEditing(false)} />;
  return (
    <article class={styles["question"]}>
      <HiddenText>{t("you.said")}</HiddenText>
      {entry.files.value.length > 0 && (
        <div class={styles["questionFiles"]}>
          {entry.files.value.map((id) => (
            <DocumentChip key={id} id={id} />
          ))}
        </div>
      )}
      <div class={styles["questionText"]} dir="auto">
        {text.length > LONG_CHARS ? <Long text={text} /> : text}
      </div>
      <div class={styles["tools"]} data-quiet>
        {turn !== null && <VersionSwitch thread={thread} turn={turn} changed="question" />}
        <time class={styles["when"]}>{fullMoment(entry.at.value)}</time>
        <Copy text={() => text} label={t("copy")} />
        <IconButton icon="edit" label={t("edit.question")} size={16} disabled={thread.answering.value} onClick={() => setEditing(true)} />
      </div>
    </article>
  );
}

function Editor({ entry, thread, onClose }: { entry: Entry; thread: Thread; onClose: () => void }) {
  const [text, setText] = useState(entry.text.value);
  const [busy, setBusy] = useState(false);
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    field.current?.focus();
    field.current?.form?.scrollIntoView({ block: "nearest" });
    field.current?.setSelectionRange(text.length, text.length);
  }, []);
  const send = async () => {
    if (text.trim() === "" || busy) return;
    setBusy(true);
    if (await attempt(() => editQuestion(thread, entry, text.trim()))) onClose();
    setBusy(false);
  };
  return (
    <form class={styles["editor"]} onSubmit={(event) => (event.preventDefault(), void send())}>
      <textarea
        ref={field}
        value={text}
        rows={Math.min(12, text.split("\n").length + 1)}
        aria-label={t("edit.question")}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.isComposing || event.keyCode === 229) return; // Enter belongs to the input method
          if (event.key === "Escape") {
            event.preventDefault(); // it stops no answer
            onClose();
          }
          if (event.key === "Enter" && !event.shiftKey) {
            event.preventDefault();
            void send();
          }
        }}
      />
      <p class={styles["hint"]}>{t("edit.hint")}</p>
      <div class={styles["editorButtons"]}>
        <Button onClick={onClose}>{t("cancel")}</Button>
        <Button type="submit" tone="primary" disabled={busy || branching.value || text.trim() === ""}>
          {t("edit.send")}
        </Button>
      </div>
    </form>
  );
}
