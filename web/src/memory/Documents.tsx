/** The documents that the server keeps: what they are, opening one, deleting one. */
import { useEffect, useState } from "preact/hooks";
import { listFiles } from "../api/files";
import type { FileObject } from "../api/types";
import { ingestOf } from "../composer/AttachmentChip";
import { Button, Dialog, DialogButtons, Failure, IconButton, Spinner } from "../design/controls";
import { attempt } from "../state/attempt";
import { deleteDocument, knownDocument } from "../state/documents";
import { openPanel } from "../state/panel";
import { bytes, moment, t } from "../text";
import styles from "./memory.module.css";

export function Documents() {
  const [files, setFiles] = useState<readonly FileObject[] | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  const [deleting, setDeleting] = useState<FileObject | null>(null);
  const load = () => listFiles().then((found) => (setFiles(found), setFailure(null)), setFailure);
  useEffect(() => void load(), []);
  if (failure !== null) return <Failure error={failure} onRetry={() => void load()} />;
  if (files === null) return <p role="status" aria-label={t("loading")}><Spinner /></p>;
  if (files.length === 0) return <p class={styles["empty"]}>{t("documents.empty")}</p>;
  const remove = (file: FileObject) => attempt(async () => (await deleteDocument(file.id), await load()));
  return (
    <>
      <ul class={styles["facts"]}>
        {files.map((each) => (
          <Document key={each.id} file={each} onDelete={() => setDeleting(each)} />
        ))}
      </ul>
      {deleting && (
        <Dialog title={t("documents.delete", { name: deleting.filename })} onClose={() => setDeleting(null)}>
          <p>{t("documents.delete.text")}</p>
          <DialogButtons>
            <Button onClick={() => setDeleting(null)}>{t("cancel")}</Button>
            <Button tone="danger" onClick={() => void remove(deleting).then((done) => done && setDeleting(null))}>{t("delete")}</Button>
          </DialogButtons>
        </Dialog>
      )}
    </>
  );
}

/** As it is now: one that is being read says how far. */
function Document({ file, onDelete }: { file: FileObject; onDelete: () => void }) {
  const known = knownDocument(file).value;
  const now = known.state === "known" ? known.file : file;
  const open = () => openPanel({ kind: "page", fileId: file.id, filename: file.filename, page: 1, mark: null, origin: null });
  return (
    <li>
      <span class={styles["factKey"]}>{moment(file.created_at)}</span>
      <div>
        <button type="button" class={styles["link"]} onClick={open}>
          {file.filename}
        </button>
        <p class={styles["origin"]}>
          {ingestOf(now).words} · {bytes(file.bytes)}
        </p>
      </div>
      <span class={styles["factTools"]}>
        <IconButton icon="trash" label={t("documents.delete", { name: file.filename })} size={16} onClick={onDelete} />
      </span>
    </li>
  );
}
