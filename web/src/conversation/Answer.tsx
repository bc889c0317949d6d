/** An answer: its text as it comes, what goes on meanwhile, where it is from, and what can be done with it. */
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Citation } from "../api/types";
import { Button, Failure, HiddenText, IconButton, Notice } from "../design/controls";
import { Copy } from "../design/Copy";
import { blocksOf } from "../markdown/parse";
import { Markdown } from "../markdown/Markdown";
import { answerAnew, ask, branchAt, branching } from "../state/actions";
import { announce } from "../state/announcer";
import { attempt } from "../state/attempt";
import type { Entry, Live } from "../state/entry";
import type { Origin } from "../state/panel";
import type { Thread } from "../state/thread";
import { t, type Key } from "../text";
import { AnswerCard } from "./AnswerCard";
import { Citations } from "./Citations";
import { FeedbackButtons } from "./FeedbackButtons";
import { Progress } from "./Progress";
import { Thoughts } from "./Thoughts";
import { VersionSwitch } from "./VersionSwitch";
import styles from "./conversation.module.css";

interface Props {
  entry: Entry;
  question: Entry | null;
  thread: Thread;
  isLast: boolean;
}

export function Answer({ entry, question, thread, isLast }: Props) {
  const live = entry.live.value;
  const origin: Origin = { question: question?.text.value ?? "", answer: entry.text.value, answerId: entry.answerId.value, session: thread.session };
  const wasLive = useRef(false);
  useEffect(() => {
    if (wasLive.current && live === null) announce(t("answer.done"));
    wasLive.current = live !== null;
  }, [live]);
  return (
    <article class={styles["answer"]} aria-busy={live !== null}>
      <HiddenText>{t("perilune.said")}</HiddenText>
      {live ? <Growing live={live} origin={origin} /> : <Complete entry={entry} question={question} thread={thread} origin={origin} isLast={isLast} />}
    </article>
  );
}

function Growing({ live, origin }: { live: Live; origin: Origin }) {
  void live.frame.value; // something came
  return (
    <>
      {live.thoughts !== "" && <Thoughts text={live.thoughts} growing={live.firstText_s.value === null} />}
      <Markdown settled={live.blocks.settled} last={live.blocks.last} />
      <Progress live={live} />
      {live.citations.value.length > 0 && <Citations citations={live.citations.value} origin={origin} />}
    </>
  );
}

function Complete({ entry, question, thread, origin, isLast }: Props & { origin: Origin }) {
  const text = entry.text.value;
  const blocks = useMemo(() => blocksOf(text), [text]);
  const report = entry.report.value;
  const citations: readonly Citation[] = report?.citations ?? [];
  return (
    <>
      {entry.thoughts.value !== "" && <Thoughts text={entry.thoughts.value} growing={false} />}
      <Markdown settled={blocks} last="" />
      <Ending entry={entry} question={question} thread={thread} isLast={isLast} />
      {citations.length > 0 && <Citations citations={citations} origin={origin} />}
      {report?.plan && <AnswerCard report={report} usage={entry.usage.value} />}
      <Tools entry={entry} question={question} thread={thread} />
    </>
  );
}

/** Where an answer ended otherwise than by itself: why, and how to go on. */
function Ending({ entry, question, thread, isLast }: Props) {
  const again = question && (() => void attempt(() => answerAnew(thread, question)));
  const failure = entry.failure.value;
  if (failure !== null) return <Failure error={failure} onRetry={again} />;
  const ending = endingOf(entry);
  if (ending === null) return null;
  const said = entry.turn.value !== null && entry.text.value !== "";
  return (
    <Notice
      tone={ending === "ended.broken" || ending === "ended.torn" ? "warn" : "plain"}
      actions={
        <>
          {again && ending !== "ended.length" && <Button onClick={again}>{t("ask.again")}</Button>}
          {isLast && said && <Button onClick={() => ask(thread, { text: t("continue.text"), files: [] })}>{t("continue")}</Button>}
        </>
      }
    >
      {t(ending)}
    </Notice>
  );
}

function endingOf(entry: Entry): Key | null {
  const reason = entry.finish.value;
  if (reason === "length") return "ended.length";
  if (reason !== "cancelled" && reason !== "error") return null;
  if (entry.torn.value) return "ended.torn";
  if (reason === "error") return "ended.broken";
  return entry.turn.value === null ? "ended.stopped.unkept" : "ended.stopped";
}

function Tools({ entry, question, thread }: Omit<Props, "isLast">) {
  const busy = thread.answering.value || branching.value;
  const turn = entry.turn.value;
  return (
    <div class={styles["tools"]}>
      {turn !== null && <VersionSwitch thread={thread} turn={turn - 1} changed="answer" />}
      <Copy text={() => entry.text.value} label={t("copy.answer")} />
      {question && (
        <IconButton icon="again" label={t("regenerate")} size={16} disabled={busy} onClick={() => void attempt(() => answerAnew(thread, question))} />
      )}
      {turn !== null && (
        <IconButton icon="branch" label={t("branch")} size={16} disabled={busy} onClick={() => void attempt(() => branchAt(thread, turn))} />
      )}
      {entry.answerId.value !== null && <FeedbackButtons answerId={entry.answerId.value} thread={thread} />}
    </div>
  );
}
