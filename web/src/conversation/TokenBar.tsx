/** Where the offered text went, as a bar: read exactly, estimated, summarised, left out. */
import type { TokenCounts } from "../api/types";
import { count, percent, t } from "../text";
import styles from "./card.module.css";

export type TokenKind = "exact" | "estimated" | "summarised" | "dropped";

const KINDS: readonly TokenKind[] = ["exact", "estimated", "summarised", "dropped"];

/** The kinds there are any of, in the bar's order. */
export function shownTokens(tokens: TokenCounts): { kind: TokenKind; n: number }[] {
  return KINDS.map((kind) => ({ kind, n: tokens[kind] })).filter(({ n }) => n > 0);
}

export function TokenBar({ tokens, wide = false }: { tokens: TokenCounts; wide?: boolean }) {
  const shown = shownTokens(tokens);
  const all = shown.reduce((sum, { n }) => sum + n, 0);
  const label = shown.map(({ kind, n }) => `${t(`tokens.${kind}`, { n: count(n) })} (${percent(n / all)})`).join(", ");
  return (
    <span class={styles["bar"]} data-wide={wide} role="img" aria-label={label} title={label}>
      {shown.map(({ kind, n }) => (
        <span key={kind} data-kind={kind} style={{ flexGrow: n / all }} />
      ))}
    </span>
  );
}
