/** A formula. KaTeX and its fonts are loaded with the first one; until then, and where it fails, its source stands there. */
import { useEffect, useRef, useState } from "preact/hooks";
import { Slices } from "./slices";
import styles from "./markdown.module.css";

const MAX_CHARS = 2_000;
/** A browser's layout goes down a tree as deep as a formula is nested: three hundred roots in each other crash the tab. */
const MAX_DEPTH = 150;
const MAX_ELEMENTS = 4_000;

interface Katex {
  render(tex: string, element: HTMLElement, options: Record<string, unknown>): void;
}

let loading: Promise<Katex> | null = null;
const slices = new Slices();

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

/** What KaTeX makes of a formula; null where it is none, or is too much for a browser to lay out. */
function rendered(katex: Katex, tex: string, display: boolean): HTMLElement | null {
  const made = document.createElement("span"); // in no page yet: nothing lays it out before its size is known
  try {
    katex.render(tex, made, { displayMode: display, throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 });
  } catch {
    return null;
  }
  return isModest(made) ? made : null;
}

function isModest(made: Element): boolean {
  let left = MAX_ELEMENTS;
  let level = [made];
  for (let depth = 0; level.length > 0; depth++) {
    left -= level.length;
    if (depth > MAX_DEPTH || left < 0) return false;
    level = level.flatMap((each) => [...each.children]);
  }
  return true;
}

export function Formula({ tex, display }: { tex: string; display: boolean }) {
  const place = useRef<HTMLSpanElement>(null);
  const [shown, setShown] = useState(false);
  useEffect(() => {
    if (tex.length > MAX_CHARS) return;
    let left = false;
    let leave = () => undefined as unknown;
    const show = (loaded: Katex) => {
      const made = rendered(loaded, tex, display);
      if (made) place.current?.replaceChildren(made);
      setShown(made !== null);
    };
    katex().then(
      (loaded) => left || (leave = slices.add(() => show(loaded))),
      () => setShown(false), // not loaded: the source is shown
    );
    return () => {
      left = true;
      leave();
    };
  }, [tex, display]);
  return (
    <span class={display ? styles["display"] : styles["formula"]}>
      <span ref={place} hidden={!shown} />
      {!shown && <code>{tex}</code>}
    </span>
  );
}
