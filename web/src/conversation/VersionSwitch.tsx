/** ‹ 2/3 ›: the versions of a conversation from one question on. Stands at the question where it was edited, else at the answer. */
import { useEffect, useState } from "preact/hooks";
import { readTurn } from "../api/sessions";
import type { Session } from "../api/types";
import { IconButton } from "../design/controls";
import { sessionOf, sessions, versionsAfter } from "../state/conversations";
import { openConversation } from "../state/route";
import type { Thread } from "../state/thread";
import { t } from "../text";
import styles from "./conversation.module.css";

const texts = new Map<string, Promise<string | null>>();

/** The question that a version begins with. */
function questionOf(session: Session, turn: number): Promise<string | null> {
  const name = `${session.id}/${turn}`;
  let text = texts.get(name);
  if (!text) {
    text = readTurn(session.id, turn).then(
      (read) => read?.text ?? null,
      () => (texts.delete(name), null),
    );
    texts.set(name, text);
  }
  return text;
}

export function VersionSwitch({ thread, turn, changed }: { thread: Thread; turn: number; changed: "question" | "answer" }) {
  const session = sessionOf(thread.session);
  const versions = session ? versionsAfter(sessions.value ?? [], session, turn - 1) : null;
  const names = versions?.all.map((each) => each.id).join() ?? "";
  const [edited, setEdited] = useState<boolean | null>(null);
  useEffect(() => {
    if (!versions) return;
    let left = false;
    void Promise.all(versions.all.map((each) => questionOf(each, turn))).then((found) => {
      const known = new Set(found.filter((each) => each !== null));
      if (!left) setEdited(known.size > 1);
    });
    return () => {
      left = true;
    };
  }, [names, turn]);
  if (!versions || edited === null || edited !== (changed === "question")) return null;
  const { all, current } = versions;
  const open = (index: number) => {
    const to = all[index];
    if (to) openConversation(to.id, turn);
  };
  return (
    <span class={styles["versions"]} role="group" aria-label={t("versions")}>
      <IconButton icon="left" label={t("version.before")} size={15} disabled={current === 0} onClick={() => open(current - 1)} />
      <span>{t("version.of", { n: current + 1, all: all.length })}</span>
      <IconButton icon="right" label={t("version.after")} size={15} disabled={current === all.length - 1} onClick={() => open(current + 1)} />
    </span>
  );
}
