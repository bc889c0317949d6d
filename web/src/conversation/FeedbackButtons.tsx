/** Thumbs, the reason, and the way to the right place. */
import { useState } from "preact/hooks";
import { giveFeedback, takeBackFeedback } from "../api/memory";
import type { Feedback, FeedbackReason } from "../api/types";
import { Button, Dialog, DialogButtons, IconButton, TextField } from "../design/controls";
import { announce } from "../state/announcer";
import { attempt } from "../state/attempt";
import type { Thread } from "../state/thread";
import { t } from "../text";
import styles from "./card.module.css";

const REASONS: readonly FeedbackReason[] = [
  "incorrect",
  "incomplete",
  "not_found",
  "wrong_source",
  "off_topic",
  "style",
  "slow",
  "unsafe",
  "other",
];

/** Tell the server, and remember what it keeps. */
async function give(thread: Thread, feedback: Feedback): Promise<void> {
  const { id } = await giveFeedback(feedback);
  thread.feedback.value = new Map(thread.feedback.value).set(feedback.answer_id, { ...feedback, id });
  announce(t("feedback.thanks"));
}

async function takeBack(thread: Thread, answerId: string, id: string): Promise<void> {
  await takeBackFeedback(id);
  const left = new Map(thread.feedback.value);
  left.delete(answerId);
  thread.feedback.value = left;
}

export function FeedbackButtons({ answerId, thread }: { answerId: string; thread: Thread }) {
  const [asking, setAsking] = useState(false);
  const given = thread.feedback.value.get(answerId);
  const press = (rating: "up" | "down") =>
    attempt(async () => {
      if (given?.rating === rating) return takeBack(thread, answerId, given.id);
      await give(thread, { answer_id: answerId, rating });
      if (rating === "down") setAsking(true);
    });
  return (
    <>
      <IconButton icon="up" label={t("feedback.up")} size={16} pressed={given?.rating === "up"} onClick={() => void press("up")} />
      <IconButton icon="down" label={t("feedback.down")} size={16} pressed={given?.rating === "down"} onClick={() => void press("down")} />
      {asking && <ReasonDialog answerId={answerId} thread={thread} onClose={() => setAsking(false)} />}
    </>
  );
}

function ReasonDialog({ answerId, thread, onClose }: { answerId: string; thread: Thread; onClose: () => void }) {
  const [reason, setReason] = useState<FeedbackReason>("incorrect");
  const [comment, setComment] = useState("");
  const send = async () => {
    const feedback: Feedback = { answer_id: answerId, rating: "down", reason };
    if (comment.trim()) feedback.comment = comment.trim().slice(0, 2000);
    if (await attempt(() => give(thread, feedback))) onClose();
  };
  return (
    <Dialog title={t("feedback.title")} onClose={onClose}>
      <form onSubmit={(event) => (event.preventDefault(), void send())}>
        <fieldset class={styles["reasons"]}>
          <legend>{t("feedback.why")}</legend>
          {REASONS.map((each) => (
            <label key={each}>
              <input type="radio" name="reason" checked={reason === each} onChange={() => setReason(each)} />
              {t(`feedback.${each}`)}
            </label>
          ))}
        </fieldset>
        <TextField value={comment} onInput={setComment} label={t("feedback.comment")} placeholder={t("feedback.comment")} />
        <p class={styles["hint"]}>{t("feedback.span.hint")}</p>
        <DialogButtons>
          <Button onClick={onClose}>{t("cancel")}</Button>
          <Button type="submit" tone="primary">{t("feedback.send")}</Button>
        </DialogButtons>
      </form>
    </Dialog>
  );
}
