/** The title of the conversation and what can be done with all of it. */
import { useState } from "preact/hooks";
import { exportSession } from "../api/sessions";
import { IconButton } from "../design/controls";
import { Menu } from "../design/Menu";
import { DeleteDialog, RenameDialog } from "../sidebar/ConversationDialogs";
import { sessionOf } from "../state/conversations";
import { saveBlob } from "../state/save";
import { sidebarOpen } from "../state/sidebar";
import type { Thread } from "../state/thread";
import { attempt } from "../state/attempt";
import { t } from "../text";
import styles from "./conversation.module.css";

export function ConversationHead({ thread }: { thread: Thread | null }) {
  const [dialog, setDialog] = useState<"rename" | "delete" | null>(null);
  const session = thread ? sessionOf(thread.session) : undefined;
  const missing = thread?.state.value.is === "missing";
  const title = session?.title || t(missing ? "conversation.none" : "conversation.untitled");
  const save = (format: "markdown" | "json") =>
    attempt(async () => {
      const name = title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";
      saveBlob(await exportSession(thread!.session, format), `${name}.${format === "markdown" ? "md" : "json"}`);
    });
  return (
    <header class={styles["head"]}>
      <span class={styles["onlyNarrow"]}>
        <IconButton icon="menu" label={t("sidebar.open")} expanded={sidebarOpen.value} onClick={() => (sidebarOpen.value = true)} />
      </span>
      <h1 class={styles["title"]}>{thread ? title : t("conversation.new")}</h1>
      {session && session.turns > 0 && (
        <Menu
          label={t("conversation.menu")}
          items={[
            { icon: "edit", label: t("rename"), onClick: () => setDialog("rename") },
            { icon: "save", label: t("export.markdown"), onClick: () => void save("markdown") },
            { icon: "save", label: t("export.json"), onClick: () => void save("json") },
            { icon: "trash", label: t("delete"), onClick: () => setDialog("delete"), danger: true },
          ]}
        />
      )}
      {dialog === "rename" && session && <RenameDialog session={session} onClose={() => setDialog(null)} />}
      {dialog === "delete" && session && <DeleteDialog session={session} onClose={() => setDialog(null)} />}
    </header>
  );
}
