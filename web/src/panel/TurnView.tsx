/** An earlier turn that an answer drew on, with the words marked, and the way to its conversation. */
import { useEffect, useRef, useState } from "preact/hooks";
import { readTurn } from "../api/sessions";
import type { Turn } from "../api/types";
import { Button, Failure, Spinner } from "../design/controls";
import { sessionOf } from "../state/conversations";
import { closePanel, type Panel } from "../state/panel";
import { openConversation } from "../state/route";
import { fullMoment, t } from "../text";
import { quoteIn } from "./marked";
import { MarkedText } from "./PageView";
import styles from "./panel.module.css";

type Shown = Extract<Panel, { kind: "turn" }>;

export function TurnView({ shown }: { shown: Shown }) {
  const [turn, setTurn] = useState<Turn | null | "loading">("loading");
  const [failure, setFailure] = useState<unknown>(null);
  const mark = useRef<HTMLElement>(null);
  useEffect(() => {
    readTurn(shown.session, shown.turn).then(setTurn, setFailure);
  }, [shown.session, shown.turn]);
  useEffect(() => mark.current?.scrollIntoView({ block: "center" }), [turn, shown.quote]);
  if (failure !== null) return <div class={styles["body"]}><Failure error={failure} /></div>;
  if (turn === "loading") return <div class={styles["body"]} role="status" aria-label={t("loading")}><Spinner /></div>;
  if (turn === null) return <p class={styles["body"]}>{t("source.gone")}</p>;
  const open = () => {
    openConversation(turn.session, turn.turn);
    if (matchMedia("(max-width: 48rem)").matches) closePanel();
  };
  return (
    <>
      <p class={styles["bar"]}>
        <span>
          {t(turn.speaker === "user" ? "turn.user" : "turn.assistant", { n: turn.turn, when: fullMoment(turn.at) })}
          {sessionOf(turn.session)?.title ? ` · ${sessionOf(turn.session)?.title}` : ""}
        </span>
      </p>
      <div class={styles["body"]} tabIndex={0} role="region" aria-label={t("panel.turn")} dir="auto">
        <MarkedText pieces={quoteIn(turn.text, shown.quote)} mark={mark} origin={shown.origin} />
      </div>
      <div class={styles["better"]}>
        <Button onClick={open}>{t("turn.open")}</Button>
      </div>
    </>
  );
}
