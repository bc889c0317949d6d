/** Where questions are written: text, documents by button, paste or drop, and how long the answer may take. */
import { useLayoutEffect, useRef } from "preact/hooks";
import { announce } from "../state/announcer";
import { openDraft, type Draft } from "../state/drafts";
import { online } from "../api/client";
import { t } from "../text";
import { Icon } from "../design/Icon";
import { HiddenText, IconButton } from "../design/controls";
import { AttachmentChip } from "./AttachmentChip";
import { DeadlineChooser } from "./DeadlineChooser";
import styles from "./composer.module.css";

export function focusComposer(): void {
  document.getElementById("question")?.focus();
}

interface Props {
  draft: Draft;
  answering: boolean;
  onAsk: (text: string, files: readonly string[]) => void;
  onStop: () => void;
}

export function Composer({ draft, answering, onAsk, onStop }: Props) {
  const text = draft.text.value;
  const attachments = draft.attachments.value;
  const field = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const coming = attachments.some((each) => each.id.value === null); // a failed one must be taken away first
  const ready = text.trim() !== "" && !answering && !coming;

  // As tall as its text, within bounds (field-sizing isn't everywhere yet).
  useLayoutEffect(() => {
    const area = field.current;
    if (!area) return;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, 0.4 * innerHeight)}px`;
  }, [text]);

  const send = () => {
    if (!ready) return;
    const ids = attachments.flatMap((each) => (each.id.value === null ? [] : [each.id.value]));
    draft.clear();
    onAsk(text.trim(), ids);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    // While an input method composes (Chinese, Japanese), Enter belongs to it; Safari tells by the key code.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    if (matchMedia("(pointer: coarse)").matches) return; // a phone has no other way to begin a line
    event.preventDefault();
    send();
  };
  const onPaste = (event: ClipboardEvent) => {
    const files = event.clipboardData?.files;
    if (!files || files.length === 0) return;
    event.preventDefault();
    take(files);
  };
  return (
    <form class={styles["composer"]} onSubmit={(event) => (event.preventDefault(), send())}>
      {attachments.length > 0 && (
        <ul class={styles["chips"]} aria-label={t("attachments")}>
          {attachments.map((each) => (
            <AttachmentChip key={each.key} attachment={each} onRemove={() => draft.detach(each)} />
          ))}
        </ul>
      )}
      <label>
        <HiddenText>{t("question.label")}</HiddenText>
        <textarea
          id="question"
          ref={field}
          class={styles["field"]}
          rows={1}
          value={text}
          placeholder={t("question.placeholder")}
          onInput={(event) => (draft.text.value = event.currentTarget.value)}
          onKeyDown={onKeyDown}
          onPaste={onPaste}
        />
      </label>
      <div class={styles["bar"]}>
        <IconButton icon="clip" label={t("attach")} onClick={() => picker.current?.click()} />
        <input
          ref={picker}
          type="file"
          multiple
          hidden
          aria-label={t("attach")}
          onChange={(event) => {
            take(event.currentTarget.files ?? []);
            event.currentTarget.value = "";
          }}
        />
        <DeadlineChooser />
        <span class={styles["space"]} />
        {!online.value && <span class={styles["offline"]}>{t("offline.short")}</span>}
        {answering ? (
          <button type="button" class={styles["send"]} aria-label={t("stop")} title={t("stop.title")} onClick={onStop}>
            <Icon name="stop" size={16} />
          </button>
        ) : (
          <button type="submit" class={styles["send"]} aria-label={t("send")} title={t("send.title")} disabled={!ready}>
            <Icon name="send" size={18} />
          </button>
        )}
      </div>
    </form>
  );
}

/** Attach files to the question that is being written. */
export function take(files: Iterable<File>): void {
  const given = Array.from(files);
  if (given.length === 0) return;
  openDraft.peek().attach(given);
  announce(t("attached", { names: given.map((each) => each.name).join(", ") }));
  focusComposer();
}
