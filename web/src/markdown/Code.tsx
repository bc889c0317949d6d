/** A block of code: its language, a button that copies it, colours when it is complete. */
import { useEffect, useState } from "preact/hooks";
import { Copy } from "../design/Copy";
import { t } from "../text";
import { highlight } from "./highlight";
import type { Run } from "./highlighter";
import styles from "./markdown.module.css";

export function Code({ language, code, growing }: { language: string; code: string; growing: boolean }) {
  const [runs, setRuns] = useState<Run[]>([]);
  useEffect(() => {
    if (growing) return;
    let left = false;
    void highlight(language, code).then((found) => {
      if (!left) setRuns(found);
    });
    return () => {
      left = true;
    };
  }, [language, code, growing]);
  return (
    <figure class={styles["code"]}>
      <figcaption>
        <span>{language || t("code.plain")}</span>
        <Copy text={() => code} label={t("code.copy")} />
      </figcaption>
      <pre tabIndex={0} aria-label={t("code.label", { language: language || t("code.plain") })}>
        <code>
          {runs.length > 0 && !growing
            ? runs.map(([kind, text], index) =>
                kind === "" ? text : <span key={index} data-kind={kind}>{text}</span>,
              )
            : code}
        </code>
      </pre>
    </figure>
  );
}
