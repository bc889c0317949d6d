/** The middle of the page: one conversation, or the beginning of one, and the composer. */
import { useEffect, useState } from "preact/hooks";
import { Composer, focusComposer, take } from "../composer/Composer";
import { Failure, Notice, Button } from "../design/controls";
import { ask } from "../state/actions";
import { draftOf } from "../state/drafts";
import { openConversation } from "../state/route";
import { threadOf } from "../state/threads";
import type { Thread } from "../state/thread";
import { Welcome } from "../start/Welcome";
import { t } from "../text";
import { ConversationHead } from "./ConversationHead";
import { Turns } from "./Turns";
import styles from "./conversation.module.css";

export function Conversation({ session, turn }: { session: string | null; turn: number | null }) {
  const thread = session === null ? null : threadOf(session);
  const [dropping, setDropping] = useState(false);
  const answering = thread?.answering.value ?? false;
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches && turn === null) focusComposer();
  }, [session]);
  return (
    <main
      id="main"
      class={styles["conversation"]}
      onDragOver={(event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        setDropping(true);
      }}
      onDragLeave={(event) => event.currentTarget.contains(event.relatedTarget as Node | null) || setDropping(false)}
      onDrop={(event) => {
        event.preventDefault();
        setDropping(false);
        take(event.dataTransfer?.files ?? []);
      }}
    >
      <ConversationHead thread={thread} />
      {thread === null ? <Welcome /> : <Body thread={thread} turn={turn} />}
      {thread?.state.value.is !== "missing" && (
        <div class={styles["foot"]}>
          <Composer
            draft={draftOf(session)}
            answering={answering}
            onAsk={(text, files) => ask(thread, { text, files })}
            onStop={() => void thread?.stop()}
          />
          <p class={styles["caution"]}>{t("caution")}</p>
        </div>
      )}
      {dropping && <div class={styles["drop"]}>{t("drop.here")}</div>}
    </main>
  );
}

function Body({ thread, turn }: { thread: Thread; turn: number | null }) {
  const state = thread.state.value;
  if (state.is === "missing") {
    return (
      <div class={styles["middle"]}>
        <Notice actions={<Button onClick={() => openConversation(null)}>{t("conversation.new")}</Button>}>
          <p>{t("conversation.missing")}</p>
        </Notice>
      </div>
    );
  }
  // A question that was asked before its conversation could be read is shown at once.
  if (state.is === "ready" || thread.entries.value.length > 0) return <Turns key={thread.session} thread={thread} turn={turn} />;
  if (state.is === "loading") return <Skeleton />;
  return (
    <div class={styles["middle"]}>
      <Failure error={state.error} onRetry={() => thread.load()} />
    </div>
  );
}

/** The shape of what comes, for the moment until it is there. */
function Skeleton() {
  return (
    <div class={styles["skeleton"]} role="status" aria-label={t("loading")}>
      <span />
      <span />
      <span />
      <span />
    </div>
  );
}
