/** A document on its way: leaving, being read page by page, ready; or why not. */
import type { FileObject } from "../api/types";
import { HiddenText, IconButton } from "../design/controls";
import { Icon } from "../design/Icon";
import { documentOf, type Attachment } from "../state/documents";
import { openPanel } from "../state/panel";
import { bytes, count, hasText, language, percent, t } from "../text";
import { lineOf } from "../text/failures";
import styles from "./composer.module.css";

interface Stage {
  words: string;
  /** Between 0 and 1; null where nobody knows. */
  share: number | null;
  state: "busy" | "ready" | "failed";
}

/** What ingest is doing, in words. */
export function ingestOf(file: FileObject): Stage {
  const { status, pages_total, pages_parsed, tokens } = file.perilune;
  if (file.status === "error") return { words: whyFailed(file), share: null, state: "failed" };
  if (file.status === "processed") {
    const size = pages_total ? t(pages_total === 1 ? "file.page" : "file.pages", { n: count(pages_total) }) : bytes(file.bytes);
    return { words: tokens ? `${size} · ${t("file.tokens", { n: count(tokens) })}` : size, share: 1, state: "ready" };
  }
  if (status === "parsing" && pages_total) {
    const share = (pages_parsed ?? 0) / pages_total;
    return { words: t("file.reading", { n: count(pages_parsed ?? 0), total: count(pages_total) }), share, state: "busy" };
  }
  if (status === "prefilling") return { words: t("file.preparing"), share: null, state: "ready" };
  return { words: t("file.waiting"), share: null, state: "busy" };
}

/** In the reader's language by its code; the server's own words, with their figures, where those are in it. */
function whyFailed(file: FileObject): string {
  const why = file.status_details ?? "";
  if (language.value === "en" && why !== "") return why;
  const key = `unreadable.${file.perilune.error_code}`;
  return hasText(key) ? t(key) : `${t("file.failed")} ${why}`.trim();
}

export function AttachmentChip({ attachment, onRemove }: { attachment: Attachment; onRemove: () => void }) {
  const stage = stageOf(attachment);
  return (
    <li class={styles["chip"]} data-state={stage.state}>
      <Icon name="page" size={17} />
      <span class={styles["chipText"]}>
        <span class={styles["name"]}>{attachment.name}</span>
        <span class={styles["stage"]} role={stage.state === "failed" ? "alert" : undefined}>
          {stage.words}
        </span>
      </span>
      <IconButton icon="close" label={t("attachment.remove", { name: attachment.name })} size={15} onClick={onRemove} />
      {stage.state === "busy" && (
        <progress class={styles["progress"]} {...(stage.share === null ? {} : { value: stage.share })} max={1} aria-label={attachment.name} />
      )}
    </li>
  );
}

function stageOf(attachment: Attachment): Stage {
  const failure = attachment.failure.value;
  if (failure !== null) return { words: lineOf(failure), share: null, state: "failed" };
  const id = attachment.id.value;
  if (id === null) {
    return { words: t("file.sending", { share: percent(attachment.sent.value) }), share: attachment.sent.value, state: "busy" };
  }
  const known = documentOf(id).value;
  if (known.state === "gone") return { words: t("file.gone"), share: null, state: "failed" };
  return known.state === "known" ? ingestOf(known.file) : { words: t("file.waiting"), share: null, state: "busy" };
}

/** A document that a question was about: opens at its first page. */
export function DocumentChip({ id }: { id: string }) {
  const known = documentOf(id).value;
  if (known.state === "loading") return null;
  if (known.state === "gone") return <span class={styles["small"]}>{t("file.gone")}</span>;
  const { filename } = known.file;
  const stage = ingestOf(known.file);
  const open = () => openPanel({ kind: "page", fileId: id, filename, page: 1, mark: null, origin: null });
  return (
    <button type="button" class={styles["small"]} onClick={open}>
      <Icon name="page" size={15} />
      <HiddenText>{t("open.document")} </HiddenText>
      <span class={styles["name"]}>{filename}</span>
      {stage.state !== "ready" && <span class={styles["stage"]}>{stage.words}</span>}
    </button>
  );
}
