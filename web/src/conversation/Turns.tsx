/**
 * The turns, however many: far ones are plain text that the browser lays out only when it must (so that searching in the
 * page and screen readers find them), near ones are shown in full. Stays at the end while one is there.
 */
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { Boundary } from "../design/Boundary";
import { memo } from "../design/memo";
import { Icon } from "../design/Icon";
import type { Entry } from "../state/entry";
import type { Thread } from "../state/thread";
import { t } from "../text";
import { Answer } from "./Answer";
import { Nearness } from "./nearness";
import { Question } from "./Question";
import styles from "./conversation.module.css";

const AT_END_PX = 80;
const PLAIN_CHARS = 8_000;
const FLASH_MS = 2_500;

export function Turns({ thread, turn }: { thread: Thread; turn: number | null }) {
  const scroller = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLOListElement>(null);
  const [away, setAway] = useState(false);
  const atEnd = useRef(turn === null);
  const lastTop = useRef(0);
  const nearness = useMemo(() => new Nearness(scroller), []);
  useEffect(() => () => nearness.close(), []);

  const toEnd = () => {
    const box = scroller.current;
    if (box) box.scrollTop = box.scrollHeight;
  };
  useLayoutEffect(() => {
    if (turn === null) toEnd();
    // What grows (an answer, a picture, a text that was estimated shorter) must not push the end away.
    const watch = new ResizeObserver(() => atEnd.current && toEnd());
    if (content.current) watch.observe(content.current);
    if (scroller.current) watch.observe(scroller.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (turn === null) return;
    atEnd.current = false;
    const target = document.getElementById(`turn-${turn}`);
    target?.scrollIntoView({ block: "center" });
    target?.focus({ preventScroll: true });
    target?.setAttribute("data-flash", "");
    const timer = setTimeout(() => target?.removeAttribute("data-flash"), FLASH_MS);
    return () => clearTimeout(timer);
  }, [turn]);
  const asked = thread.entries.value.findLast((each) => each.speaker === "user")?.key;
  useEffect(() => {
    if (!thread.answering.peek()) return; // a question was just sent
    atEnd.current = true;
    toEnd();
  }, [asked]);

  const onScroll = () => {
    const box = scroller.current;
    if (!box) return;
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < AT_END_PX;
    // Only somebody who scrolls up leaves the end; what grows below doesn't move them.
    if (near || box.scrollTop < lastTop.current - 1) atEnd.current = near;
    lastTop.current = box.scrollTop;
    setAway(!atEnd.current);
  };
  return (
    <div class={styles["room"]}>
      <div ref={scroller} class={styles["scroller"]} onScroll={onScroll} tabIndex={0} role="region" aria-label={t("turns")}>
        <ol ref={content} class={styles["turns"]}>
          {thread.entries.value.map((entry, index) => (
            <Turn
              key={entry.key}
              entry={entry}
              question={index > 0 ? (thread.entries.value[index - 1] ?? null) : null}
              thread={thread}
              nearness={nearness}
              isLast={index === thread.entries.value.length - 1}
            />
          ))}
        </ol>
      </div>
      {away && (
        <button type="button" class={styles["latest"]} onClick={() => ((atEnd.current = true), toEnd())}>
          <Icon name="latest" size={16} /> {t("to.latest")}
        </button>
      )}
    </div>
  );
}

interface TurnProps {
  entry: Entry;
  question: Entry | null;
  thread: Thread;
  nearness: Nearness;
  isLast: boolean;
}

const Turn = memo(function Turn({ entry, question, thread, nearness, isLast }: TurnProps) {
  const place = useRef<HTMLLIElement>(null);
  const [near, setNear] = useState(isLast);
  useEffect(() => (place.current ? nearness.watch(place.current, setNear) : undefined), []);
  const turn = entry.turn.value;
  const shown = near || isLast || entry.live.value !== null;
  return (
    <li
      ref={place}
      id={turn === null ? undefined : `turn-${turn}`}
      class={styles["turn"]}
      data-speaker={entry.speaker}
      tabIndex={-1}
    >
      {!shown ? (
        <div class={styles["plain"]}>{entry.text.value.slice(0, PLAIN_CHARS)}</div>
      ) : (
        <Boundary of={entry.key}>
          {entry.speaker === "user" ? <Question entry={entry} thread={thread} /> : <Answer entry={entry} question={question} thread={thread} isLast={isLast} />}
        </Boundary>
      )}
    </li>
  );
});
