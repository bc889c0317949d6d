/** The conversations: a new one, searching all, the kept ones with their branches; and the ways to memory and settings. */
import { useEffect, useRef, useState } from "preact/hooks";
import { Failure, IconButton, Button } from "../design/controls";
import { Icon, Mark } from "../design/Icon";
import { families, listFailure, loadSessions, sessions } from "../state/conversations";
import { go, openConversation, route } from "../state/route";
import { sidebarOpen } from "../state/sidebar";
import { dialog } from "../settings/dialogs";
import { t } from "../text";
import { FamilyRow } from "./FamilyRow";
import { SearchResults } from "./SearchResults";
import styles from "./sidebar.module.css";

const SHOWN = 60;

export function Sidebar() {
  const [query, setQuery] = useState("");
  const [limit, setLimit] = useState(SHOWN);
  const field = useRef<HTMLInputElement>(null);
  const open = sidebarOpen.value;
  useEffect(() => {
    if (open) field.current?.focus();
  }, [open]);
  const close = () => (sidebarOpen.value = false);
  return (
    <>
      {open && <div class={styles["shade"]} onClick={close} />}
      <nav class={styles["sidebar"]} data-open={open} aria-label={t("sidebar.label")} onKeyDown={(event) => open && event.key === "Escape" && (event.preventDefault(), close())}>
        <div class={styles["brand"]}>
          <Mark />
          <span>Perilune</span>
          <span class={styles["onlyNarrow"]}>
            <IconButton icon="close" label={t("close")} onClick={close} />
          </span>
        </div>
        <button type="button" class={styles["new"]} onClick={() => (openConversation(null), close())}>
          <Icon name="plus" /> {t("conversation.new")}
        </button>
        <div class={styles["search"]} role="search">
          <Icon name="search" size={16} />
          <input
            id="search"
            ref={field}
            type="search"
            value={query}
            placeholder={t("search.placeholder")}
            aria-label={t("search.placeholder")}
            onInput={(event) => setQuery(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Escape" && query !== "" && (event.stopPropagation(), setQuery(""))}
          />
        </div>
        <div class={styles["list"]}>
          {query.trim() !== "" ? <SearchResults query={query.trim()} onOpen={close} /> : <Kept limit={limit} onMore={() => setLimit(limit + SHOWN)} onOpen={close} />}
        </div>
        <div class={styles["foot"]}>
          <a
            class={styles["entry"]}
            href="#/memory"
            aria-current={route.value.view === "memory" ? "page" : undefined}
            onClick={(event) => (event.preventDefault(), go({ view: "memory" }), close())}
          >
            <Icon name="memory" /> {t("memory")}
          </a>
          <button type="button" class={styles["entry"]} onClick={() => ((dialog.value = "settings"), close())}>
            <Icon name="settings" /> {t("settings")}
          </button>
          <button type="button" class={`${styles["entry"]} ${styles["onlyWide"]}`} onClick={() => (dialog.value = "shortcuts")}>
            <Icon name="keys" /> {t("shortcuts")}
          </button>
        </div>
      </nav>
    </>
  );
}

function Kept({ limit, onMore, onOpen }: { limit: number; onMore: () => void; onOpen: () => void }) {
  if (sessions.value === null) {
    if (listFailure.value !== null) return <Failure error={listFailure.value} onRetry={() => void loadSessions()} />;
    return <p class={styles["empty"]}>{t("loading")}</p>;
  }
  const all = families.value;
  if (all.length === 0) return <p class={styles["empty"]}>{t("sidebar.empty")}</p>;
  return (
    <>
      <ul>
        {all.slice(0, limit).map((family) => (
          <FamilyRow key={family.root.id} family={family} onOpen={onOpen} />
        ))}
      </ul>
      {all.length > limit && <Button onClick={onMore}>{t("sidebar.more")}</Button>}
    </>
  );
}
