/** What goes on while an answer is awaited: the stage, the time left, and whether the server is still there. */
import { useEffect, useState } from "preact/hooks";
import { announce } from "../state/announcer";
import type { Live } from "../state/entry";
import { count, seconds, t } from "../text";
import styles from "./conversation.module.css";

const TICK_MS = 500;
const QUIET_MS = 5_000;

export function Progress({ live }: { live: Live }) {
  const [now, setNow] = useState(performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), TICK_MS);
    return () => clearInterval(timer);
  }, []);
  const stage = live.stage.value;
  const state = live.connection.value;
  useEffect(() => {
    if (state !== "open") announce(t(`stage.${state}`));
    else if (stage !== "connecting") announce(t(`stage.${stage}`));
  }, [stage, state]);
  const begun = live.firstText_s.value !== null;
  const connection = live.connection.value;
  if (begun && connection === "open") return <span class={styles["caret"]} role="img" aria-label={t("stage.answering")} />;
  const spent_s = (now - live.startedAt) / 1000;
  const { words, share } = stageOf(live, now);
  const quiet = now - live.heardAt > QUIET_MS;
  return (
    <div class={styles["progress"]}>
      <div class={styles["progressLine"]}>
        <span class={styles["beat"]} data-quiet={quiet || connection === "lost"} aria-hidden="true" />
        <span>{words}</span>
        <span class={styles["spent"]}>{seconds(spent_s)}</span>
      </div>
      {share !== null && <progress class={styles["progressBar"]} value={share} max={1} aria-label={words} />}
      {quiet && connection !== "lost" && <p class={styles["quiet"]}>{t("stage.quiet", { n: seconds((now - live.heardAt) / 1000) })}</p>}
    </div>
  );
}

/** Words for the stage, with what is left where that is known, and the share that is done. */
function stageOf(live: Live, now: number): { words: string; share: number | null } {
  if (live.connection.value === "lost") return { words: t("stage.lost"), share: null };
  if (live.connection.value === "again" && live.stage.value === "connecting") return { words: t("stage.again"), share: null };
  const progress = live.progress.value;
  if (live.stage.value === "prefilling" && progress && progress.total > 0) {
    const left_s = Math.max(0, progress.eta_s - (now - progress.toldAt) / 1000);
    const values = { done: count(progress.processed), total: count(progress.total), eta: seconds(left_s) };
    return { words: t("stage.reading", values), share: progress.processed / progress.total };
  }
  if (live.thoughts !== "") return { words: t("stage.thinking"), share: null };
  const planned = live.planned.value;
  if (planned && live.stage.value !== "answering") {
    const left_s = planned.predicted_ttft_s - (now - live.startedAt) / 1000;
    if (left_s > 0.5) return { words: t("stage.planned", { eta: seconds(left_s) }), share: null };
  }
  return { words: t(`stage.${live.stage.value}`), share: null };
}
