/** The page: the sidebar, one view, the source panel, the dialogs, and what is said to all of it at once. */
import { useEffect } from "preact/hooks";
import { keyWanted, online } from "../api/client";
import { Conversation } from "../conversation/Conversation";
import { Boundary } from "../design/Boundary";
import { IconButton } from "../design/controls";
import { MemoryView } from "../memory/MemoryView";
import { SourcePanel } from "../panel/SourcePanel";
import { KeyDialog } from "../settings/KeyDialog";
import { SettingsDialog } from "../settings/SettingsDialog";
import { ShortcutsDialog } from "../settings/ShortcutsDialog";
import { dialog } from "../settings/dialogs";
import { Sidebar } from "../sidebar/Sidebar";
import { announcement } from "../state/announcer";
import { mishap } from "../state/attempt";
import { sessionOf } from "../state/conversations";
import { panel } from "../state/panel";
import { addressOf, route } from "../state/route";
import { t } from "../text";
import { lineOf } from "../text/failures";
import styles from "./app.module.css";

export function App() {
  return (
    <Boundary of="page" whole>
      <Page />
    </Boundary>
  );
}

function Page() {
  const shown = route.value;
  const session = shown.view === "chat" ? sessionOf(shown.session) : undefined;
  useEffect(() => {
    document.title = session?.title ? `${session.title} · Perilune` : "Perilune";
  }, [session?.title]);
  return (
    <div class={styles["page"]} data-panel={panel.value !== null} onDragOver={refuseFiles}>
      <a class={styles["skip"]} href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("question")?.focus())}>
        {t("skip")}
      </a>
      <Sidebar />
      <Boundary of={addressOf(shown)}>
        {shown.view === "memory" ? <MemoryView /> : <Conversation session={shown.session} turn={shown.turn} />}
      </Boundary>
      <Boundary of={JSON.stringify(panel.value)}>
        <SourcePanel />
      </Boundary>
      {dialog.value === "settings" && <SettingsDialog />}
      {dialog.value === "shortcuts" && <ShortcutsDialog />}
      {keyWanted.value && <KeyDialog />}
      <Toasts />
      <div class={styles["announcer"]} role="status" aria-live="polite">
        {announcement.value}
      </div>
    </div>
  );
}

/** Beside the conversation, which takes them: a browser would open a file that is dropped there in the page's place. */
function refuseFiles(event: DragEvent): void {
  if (event.defaultPrevented || !event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "none";
}

/** What went wrong with something small, and that the server can't be reached. */
function Toasts() {
  return (
    <div class={styles["toasts"]}>
      {!online.value && (
        <div class={styles["toast"]} role="status">
          {t("offline")}
        </div>
      )}
      {mishap.value !== null && (
        <div class={styles["toast"]} role="alert" data-tone="bad">
          <span>{lineOf(mishap.value)}</span>
          <IconButton icon="close" label={t("close")} size={16} onClick={() => (mishap.value = null)} />
        </div>
      )}
    </div>
  );
}
