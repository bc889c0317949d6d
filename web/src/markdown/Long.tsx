/** Text that is too large to lay out at once: its beginning, and a button for the rest, piece by piece. */
import { useState } from "preact/hooks";
import { count, t } from "../text";
import styles from "./markdown.module.css";

const FIRST_CHARS = 2_000;
const MORE_CHARS = 40_000;
const PIECE_CHARS = 4_000;

/** Pieces that the browser lays out only when they are seen. */
export function piecesOf(text: string, size = PIECE_CHARS): string[] {
  const pieces = [];
  for (let at = 0; at < text.length; at += size) pieces.push(text.slice(at, at + size));
  return pieces;
}

export function Long({ text }: { text: string }) {
  const [shown, setShown] = useState(FIRST_CHARS);
  return (
    <div class={styles["long"]}>
      {piecesOf(text.slice(0, shown)).map((piece, index) => (
        <span key={index}>{piece}</span>
      ))}
      {shown < text.length && (
        <p>
          <button type="button" class={styles["more"]} onClick={() => setShown(shown + MORE_CHARS)}>
            {t("long.more", { rest: count(text.length - shown) })}
          </button>
        </p>
      )}
    </div>
  );
}
