/** The beginning of a conversation. For somebody who comes the first time, a guide: the machine, a document, a question. */
import { useEffect, useRef, useState } from "preact/hooks";
import { newestFiles } from "../api/files";
import type { FileObject } from "../api/types";
import { focusComposer, take } from "../composer/Composer";
import { Button } from "../design/controls";
import { Icon, Mark } from "../design/Icon";
import { openDraft } from "../state/drafts";
import { sessions } from "../state/conversations";
import { t } from "../text";
import { MachineCard } from "./MachineCard";
import styles from "./start.module.css";

const RECENT = 4;
const LOOKED_AT = 20; // some couldn't be read

export function Welcome() {
  const [files, setFiles] = useState<readonly FileObject[] | null>(null);
  useEffect(() => {
    let left = false;
    newestFiles(LOOKED_AT).then(
      (found) => left || setFiles(found),
      () => left || setFiles([]), // the sidebar says that the server can't be reached
    );
    return () => {
      left = true;
    };
  }, []);
  if (files === null || sessions.value === null) return <div class={styles["welcome"]} />;
  return sessions.value.length === 0 && files.length === 0 ? <FirstRun /> : <NewConversation files={files} />;
}

function FirstRun() {
  const picker = useRef<HTMLInputElement>(null);
  const attached = openDraft.value.attachments.value.length > 0;
  return (
    <div class={styles["welcome"]}>
      <div class={styles["hello"]}>
        <Mark size={40} />
        <h2>{t("first.title")}</h2>
        <p>{t("first.text")}</p>
      </div>
      <ol class={styles["steps"]}>
        <li>
          <h3>{t("first.machine")}</h3>
          <MachineCard />
        </li>
        <li data-done={attached}>
          <h3>{t("first.document")}</h3>
          <p>{t("first.document.text")}</p>
          <Button onClick={() => picker.current?.click()}>
            <Icon name={attached ? "check" : "clip"} size={16} />
            {attached ? t("first.document.more") : t("first.document.choose")}
          </Button>
          <input ref={picker} type="file" multiple hidden aria-label={t("attach")} onChange={(event) => take(event.currentTarget.files ?? [])} />
        </li>
        <li>
          <h3>{t("first.question")}</h3>
          <p>{t("first.question.text")}</p>
          <Proposals withDocument={attached} />
        </li>
      </ol>
    </div>
  );
}

function NewConversation({ files }: { files: readonly FileObject[] }) {
  const recent = files.filter((each) => each.status !== "error").slice(0, RECENT);
  return (
    <div class={styles["welcome"]}>
      <div class={styles["hello"]}>
        <Mark size={46} />
        <h2>{t("start.title")}</h2>
      </div>
      {recent.length > 0 && (
        <section class={styles["recent"]} aria-label={t("start.recent")}>
          <h3>{t("start.recent")}</h3>
          <ul>
            {recent.map((each) => (
              <li key={each.id}>
                <button type="button" onClick={() => openDraft.peek().attachKnown(each.id, each.filename)}>
                  <Icon name="page" size={17} />
                  <span>{each.filename}</span>
                </button>
              </li>
            ))}
          </ul>
        </section>
      )}
      <Proposals withDocument={openDraft.value.attachments.value.length > 0} />
    </div>
  );
}

function propose(question: string): void {
  openDraft.peek().text.value = question;
  focusComposer();
}

/** Questions to begin with; one is put into the field, where it can be changed. */
function Proposals({ withDocument }: { withDocument: boolean }) {
  const keys = withDocument ? (["propose.summary", "propose.dates", "propose.risks"] as const) : (["propose.explain", "propose.compare", "propose.write"] as const);
  return (
    <ul class={styles["proposals"]}>
      {keys.map((each) => (
        <li key={each}>
          <button type="button" onClick={() => propose(t(each))}>
            {t(each)}
          </button>
        </li>
      ))}
    </ul>
  );
}
