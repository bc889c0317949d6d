/** A formula. KaTeX and its fonts are loaded with the first one; until then, and where it fails, its source stands there. */
import { useEffect, useRef, useState } from "preact/hooks";
import styles from "./markdown.module.css";

const MAX_CHARS = 4_000;

interface Katex {
  render(tex: string, element: HTMLElement, options: Record<string, unknown>): void;
}

let loading: Promise<Katex> | null = null;

function katex(): Promise<Katex> {
  loading ??= (async () => {
    const sheet = document.createElement("link");
    sheet.rel = "stylesheet";
    sheet.href = FORMULA_STYLES;
    const styled = new Promise((resolve, reject) => {
      sheet.onload = resolve;
      sheet.onerror = () => reject(new Error("The styles of formulas could not be loaded."));
    });
    document.head.append(sheet);
    const [module] = await Promise.all([import("katex"), styled]);
    return module.default as Katex;
  })();
  loading.catch(() => (loading = null)); // offline: the next formula tries again
  return loading;
}

export function Formula({ tex, display }: { tex: string; display: boolean }) {
  const place = useRef<HTMLSpanElement>(null);
  const [shown, setShown] = useState(false);
  useEffect(() => {
    if (tex.length > MAX_CHARS) return;
    let left = false;
    katex()
      .then((loaded) => {
        if (left || place.current === null) return;
        loaded.render(tex, place.current, {
          displayMode: display,
          throwOnError: true,
          trust: false,
          strict: "ignore",
          maxSize: 20,
          maxExpand: 200,
        });
        setShown(true);
      })
      .catch(() => setShown(false)); // not a formula, or not loaded: the source is shown
    return () => {
      left = true;
    };
  }, [tex, display]);
  return (
    <span class={display ? styles["display"] : styles["formula"]}>
      <span ref={place} hidden={!shown} />
      {!shown && <code>{tex}</code>}
    </span>
  );
}
