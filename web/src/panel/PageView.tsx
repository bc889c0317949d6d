/** One page of a document as text, or as a picture where it has one; the way to the other pages; marking a better place. */
import { useEffect, useRef, useState } from "preact/hooks";
import { pageImage, readPage } from "../api/files";
import { giveFeedback } from "../api/memory";
import type { FilePage } from "../api/types";
import { Button, Failure, IconButton, Spinner } from "../design/controls";
import { answeringSentence } from "../conversation/excerpt";
import { piecesOf as chunksOf } from "../markdown/Long";
import { announce } from "../state/announcer";
import { openDraft } from "../state/drafts";
import { attempt } from "../state/attempt";
import { openPanel, type Origin, type Panel } from "../state/panel";
import { count, t } from "../text";
import { piecesOf, pointAt, type Pieces } from "./marked";
import styles from "./panel.module.css";

type Shown = Extract<Panel, { kind: "page" }>;

const IMAGE_WIDTH = 1200;

export function PageView({ shown }: { shown: Shown }) {
  const [page, setPage] = useState<FilePage | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  const [picture, setPicture] = useState(false);
  const [tries, setTries] = useState(0);
  useEffect(() => {
    const leaving = new AbortController();
    setFailure(null);
    readPage(shown.fileId, shown.page, leaving.signal).then(setPage, (error) => leaving.signal.aborted || setFailure(error));
    return () => leaving.abort();
  }, [shown.fileId, shown.page, tries]);
  if (failure !== null) return <div class={styles["body"]}><Failure error={failure} onRetry={() => setTries(tries + 1)} /></div>;
  if (!page) return <div class={styles["body"]} role="status" aria-label={t("loading")}><Spinner /></div>;
  return (
    <>
      <PageBar page={page} shown={shown} picture={picture} onPicture={() => setPicture(!picture)} />
      {picture ? <Picture page={page} /> : <PageText page={page} shown={shown} />}
    </>
  );
}

function PageBar(props: { page: FilePage; shown: Shown; picture: boolean; onPicture: () => void }) {
  const { page, shown } = props;
  const open = (number: number) => openPanel({ ...shown, page: Math.min(page.pages, Math.max(1, number)) });
  return (
    <div class={styles["bar"]}>
      <IconButton icon="left" label={t("page.before")} disabled={page.page <= 1} onClick={() => open(page.page - 1)} />
      <label>
        {t("page")}
        <input
          type="number"
          min={1}
          max={page.pages}
          value={page.page}
          onChange={(event) => open(Number(event.currentTarget.value) || page.page)}
        />
        {t("page.of", { n: count(page.pages) })}
      </label>
      <IconButton icon="right" label={t("page.after")} disabled={page.page >= page.pages} onClick={() => open(page.page + 1)} />
      <span class={styles["space"]} />
      {page.image && <IconButton icon="image" label={t("page.picture")} pressed={props.picture} onClick={props.onPicture} />}
      <Button onClick={() => openDraft.peek().attachKnown(page.file_id, page.filename)}>{t("page.ask")}</Button>
    </div>
  );
}

function Picture({ page }: { page: FilePage }) {
  const [address, setAddress] = useState<string | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  useEffect(() => {
    const leaving = new AbortController();
    let made: string | null = null;
    pageImage(page.file_id, page.page, IMAGE_WIDTH, leaving.signal).then(
      (blob) => setAddress((made = URL.createObjectURL(blob))),
      (error) => leaving.signal.aborted || setFailure(error),
    );
    return () => {
      leaving.abort();
      if (made) URL.revokeObjectURL(made);
    };
  }, [page.file_id, page.page]);
  return (
    <div class={styles["body"]} tabIndex={0} role="region" aria-label={t("page.picture")}>
      {failure !== null ? <Failure error={failure} /> : address === null ? <Spinner /> : <img src={address} alt={t("page.picture.alt", { n: page.page, name: page.filename })} />}
    </div>
  );
}

function PageText({ page, shown }: { page: FilePage; shown: Shown }) {
  const mark = useRef<HTMLElement>(null);
  const text = useRef<HTMLDivElement>(null);
  const [selected, setSelected] = useState<{ start: number; end: number } | null>(null);
  const pieces = piecesOf(page.text, page.start, shown.mark);
  useEffect(() => {
    mark.current?.scrollIntoView({ block: "center" });
    if (pieces.marked) announce(t("panel.marked", { page: page.page, quote: pieces.marked.slice(0, 200) }));
  }, [page, shown.mark?.start]);
  useEffect(() => {
    if (!shown.origin) return;
    const read = () => setSelected(selectionIn(text.current, page));
    read();
    document.addEventListener("selectionchange", read);
    return () => document.removeEventListener("selectionchange", read);
  }, [page, shown.origin]);
  return (
    <>
      <div ref={text} class={styles["body"]} tabIndex={0} role="region" aria-label={t("page.text", { n: page.page })} dir="auto">
        {page.text.trim() === "" ? <p class={styles["empty"]}>{t("page.empty")}</p> : <MarkedText pieces={pieces} mark={mark} origin={shown.origin} />}
      </div>
      {shown.origin && <BetterPlace key={shown.origin.answerId} shown={shown} selected={selected} />}
    </>
  );
}

/** Large pages in pieces, laid out as they are seen. */
export function MarkedText({ pieces, mark, origin }: { pieces: Pieces; mark: preact.RefObject<HTMLElement | null>; origin: Origin | null }) {
  const plain = (text: string) => (text.length < 20_000 ? text : chunksOf(text).map((each, index) => <span key={index} class={styles["chunk"]}>{each}</span>));
  return (
    <>
      {plain(pieces.before)}
      {pieces.marked && <Passage text={pieces.marked} mark={mark} origin={origin} />}
      {plain(pieces.after)}
    </>
  );
}

/** The cited passage, and in it the sentence that answers. */
function Passage({ text, mark, origin }: { text: string; mark: preact.RefObject<HTMLElement | null>; origin: Origin | null }) {
  const span = origin ? answeringSentence(text, origin.question, origin.answer) : null;
  if (!span || (span.start === 0 && span.end === text.length)) return <mark ref={mark}>{text}</mark>;
  return (
    <span class={styles["passage"]}>
      {text.slice(0, span.start)}
      <mark ref={mark}>{text.slice(span.start, span.end)}</mark>
      {text.slice(span.end)}
    </span>
  );
}

/** What is selected in the page, as code points of the whole text. */
function selectionIn(box: HTMLElement | null, page: FilePage): { start: number; end: number } | null {
  const selection = getSelection();
  if (!box || !selection || selection.isCollapsed || selection.rangeCount === 0) return null;
  const range = selection.getRangeAt(0);
  if (!box.contains(range.commonAncestorContainer)) return null;
  const before = document.createRange();
  before.selectNodeContents(box);
  before.setEnd(range.startContainer, range.startOffset);
  const from = before.toString().length;
  const to = from + range.toString().length;
  return { start: page.start + pointAt(page.text, from), end: page.start + pointAt(page.text, to) };
}

/** "The right answer stands here": the next time the question comes, this place is found first. */
function BetterPlace({ shown, selected }: { shown: Shown; selected: { start: number; end: number } | null }) {
  const [done, setDone] = useState(false);
  const { origin } = shown;
  if (!origin?.answerId) return null;
  const { answerId } = origin;
  const send = () =>
    attempt(async () => {
      if (!selected) return;
      const span = { file_id: shown.fileId, page: shown.page, ...selected };
      await giveFeedback({ answer_id: answerId, rating: "down", reason: "wrong_source", span });
      setDone(true);
      announce(t("feedback.thanks"));
    });
  return (
    <div class={styles["better"]}>
      {done ? <p role="status">{t("better.done")}</p> : <p>{selected ? t("better.selected") : t("better.hint")}</p>}
      {!done && <Button disabled={!selected} onClick={() => void send()}>{t("better.send")}</Button>}
    </div>
  );
}
