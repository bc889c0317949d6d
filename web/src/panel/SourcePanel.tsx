/** The panel beside the conversation: a page of a document or an earlier turn, with the cited words marked. */
import { useEffect, useRef } from "preact/hooks";
import { IconButton } from "../design/controls";
import { closePanel, panel } from "../state/panel";
import { t } from "../text";
import { PageView } from "./PageView";
import { TurnView } from "./TurnView";
import styles from "./panel.module.css";

export function SourcePanel() {
  const shown = panel.value;
  const box = useRef<HTMLElement>(null);
  useEffect(() => {
    if (shown) box.current?.focus();
  }, [shown === null]);
  if (!shown) return null;
  return (
    <aside
      ref={box}
      class={styles["panel"]}
      aria-label={t("panel.label")}
      tabIndex={-1}
      onKeyDown={(event) => event.key === "Escape" && (event.preventDefault(), closePanel())} // and stops no answer
    >
      <header class={styles["head"]}>
        <h2>{shown.kind === "page" ? shown.filename : t("panel.turn")}</h2>
        <IconButton icon="close" label={t("panel.close")} onClick={closePanel} />
      </header>
      {shown.kind === "page" ? <PageView key={shown.fileId} shown={shown} /> : <TurnView key={`${shown.session}/${shown.turn}`} shown={shown} />}
    </aside>
  );
}
