/** The rolling summary of a conversation: sentences as they were said; each can be corrected, struck out, restored. */
import { useEffect, useState } from "preact/hooks";
import { correctSummary, readSummary } from "../api/memory";
import type { SummarySentence } from "../api/types";
import { Button, Failure, IconButton, Spinner, TextField } from "../design/controls";
import { announce } from "../state/announcer";
import { attempt } from "../state/attempt";
import { sessions } from "../state/conversations";
import { openConversation } from "../state/route";
import { t } from "../text";
import styles from "./memory.module.css";

export function Summaries() {
  const all = sessions.value ?? [];
  const [chosen, setChosen] = useState<string | null>(null);
  const session = chosen ?? all.find((each) => each.turns > 0)?.id;
  if (session === undefined) return <p class={styles["empty"]}>{t("summary.none")}</p>;
  return (
    <>
      <label class={styles["pick"]}>
        {t("summary.of")}
        <select value={session} onChange={(event) => setChosen(event.currentTarget.value)}>
          {all.map((each) => (
            <option key={each.id} value={each.id}>
              {each.title || t("conversation.untitled")}
            </option>
          ))}
        </select>
      </label>
      <Sentences key={session} session={session} />
    </>
  );
}

function Sentences({ session }: { session: string }) {
  const [sentences, setSentences] = useState<readonly SummarySentence[] | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  const load = () => readSummary(session).then((found) => (setSentences(found), setFailure(null)), setFailure);
  useEffect(() => void load(), [session]);
  const correct = (sentence: SummarySentence, text: string | null) =>
    attempt(async () => {
      await correctSummary(session, sentence.turn ?? 0, sentence.start, text);
      await load();
      announce(t("saved"));
    });
  if (failure !== null) return <Failure error={failure} onRetry={() => void load()} />;
  if (sentences === null) return <p role="status" aria-label={t("loading")}><Spinner /></p>;
  if (sentences.length === 0) return <p class={styles["empty"]}>{t("summary.empty")}</p>;
  return (
    <ul class={styles["facts"]}>
      {sentences.map((each) => (
        <Sentence key={`${each.turn}/${each.start}`} sentence={each} session={session} onCorrect={(text) => correct(each, text)} />
      ))}
    </ul>
  );
}

function Sentence(props: { sentence: SummarySentence; session: string; onCorrect: (text: string | null) => Promise<boolean> }) {
  const { sentence, session, onCorrect } = props;
  const [editing, setEditing] = useState<string | null>(null);
  const save = async () => {
    if (editing !== null && (await onCorrect(editing.trim()))) setEditing(null);
  };
  return (
    <li>
      <button type="button" class={styles["link"]} onClick={() => openConversation(session, sentence.turn ?? null)}>
        {t("turn.number", { n: sentence.turn ?? 0 })}
      </button>
      {editing === null ? (
        <div>
          <span class={styles["factValue"]}>{sentence.text || <s>{t("summary.struck")}</s>}</span>
          {sentence.corrected && <p class={styles["origin"]}>{t("summary.corrected")}</p>}
        </div>
      ) : (
        <form class={styles["inline"]} onSubmit={(event) => (event.preventDefault(), void save())}>
          <TextField value={editing} onInput={setEditing} label={t("summary.edit")} focus />
          <Button type="submit" tone="primary">{t("save")}</Button>
          <Button onClick={() => setEditing(null)}>{t("cancel")}</Button>
        </form>
      )}
      {editing === null && (
        <span class={styles["factTools"]}>
          {sentence.corrected && <IconButton icon="again" label={t("summary.restore")} size={16} onClick={() => void onCorrect(null)} />}
          <IconButton icon="edit" label={t("summary.edit")} size={16} onClick={() => setEditing(sentence.text)} />
          <IconButton icon="trash" label={t("summary.strike")} size={16} onClick={() => void onCorrect("")} />
        </span>
      )}
    </li>
  );
}
