/** What the model thinks before it answers; closed until somebody wants to read it. */
import { useState } from "preact/hooks";
import { Icon } from "../design/Icon";
import { Long } from "../markdown/Long";
import { t } from "../text";
import styles from "./conversation.module.css";

export function Thoughts({ text, growing }: { text: string; growing: boolean }) {
  const [open, setOpen] = useState(false);
  return (
    <details class={styles["thoughts"]} open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <Icon name="below" size={15} />
        {t(growing ? "thoughts.growing" : "thoughts")}
      </summary>
      {open && (
        <div dir="auto">
          <Long text={text} />
        </div>
      )}
    </details>
  );
}
