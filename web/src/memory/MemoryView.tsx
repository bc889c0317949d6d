/** What is kept of the user: facts with where they were said, the summaries of conversations, all of it as a file, and its end. */
import { useState } from "preact/hooks";
import { exportMemory } from "../api/memory";
import { sidebarOpen } from "../state/sidebar";
import { Button, IconButton } from "../design/controls";
import { Icon } from "../design/Icon";
import { attempt } from "../state/attempt";
import { saveBlob } from "../state/save";
import { useProfile } from "../state/settings";
import { t } from "../text";
import { Documents } from "./Documents";
import { Profile } from "./Profile";
import { Summaries } from "./Summaries";
import styles from "./memory.module.css";

const PARTS = ["profile", "summaries", "documents"] as const;

export function MemoryView() {
  const [part, setPart] = useState<(typeof PARTS)[number]>("profile");
  const save = () => attempt(async () => saveBlob(await exportMemory(), "perilune-memory.jsonl"));
  return (
    <main id="main" class={styles["view"]}>
      <header class={styles["head"]}>
        <span class={styles["onlyNarrow"]}>
          <IconButton icon="menu" label={t("sidebar.open")} expanded={sidebarOpen.value} onClick={() => (sidebarOpen.value = true)} />
        </span>
        <h1>{t("memory")}</h1>
        <Button onClick={() => void save()}>
          <Icon name="save" size={16} /> {t("memory.export")}
        </Button>
      </header>
      <div class={styles["page"]}>
        <p class={styles["intro"]}>{t(useProfile.value ? "memory.text" : "memory.off")}</p>
        <div role="tablist" class={styles["tabs"]} aria-label={t("memory")}>
          {PARTS.map((each) => (
            <button key={each} type="button" role="tab" id={`tab-${each}`} aria-selected={part === each} aria-controls="memory-part" onClick={() => setPart(each)}>
              {t(`memory.${each}`)}
            </button>
          ))}
        </div>
        <div id="memory-part" role="tabpanel" aria-labelledby={`tab-${part}`}>
          {part === "profile" ? <Profile /> : part === "summaries" ? <Summaries /> : <Documents />}
        </div>
      </div>
    </main>
  );
}
