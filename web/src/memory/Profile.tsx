/** The facts about the user: each can be changed, erased, and followed to the turn in which it was said. */
import { useEffect, useState } from "preact/hooks";
import { editProfile, eraseProfile, readProfile } from "../api/memory";
import type { ProfileFact } from "../api/types";
import { Button, Dialog, DialogButtons, Failure, IconButton, Spinner, TextField } from "../design/controls";
import { announce } from "../state/announcer";
import { attempt } from "../state/attempt";
import { openConversation } from "../state/route";
import { moment, named, t } from "../text";
import styles from "./memory.module.css";

export function Profile() {
  const [facts, setFacts] = useState<readonly ProfileFact[] | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  const [history, setHistory] = useState(false);
  const [erasing, setErasing] = useState(false);
  const load = () => readProfile(history).then((found) => (setFacts(found), setFailure(null)), setFailure);
  useEffect(() => void load(), [history]);
  const change = (values: Record<string, string | null>) =>
    attempt(async () => {
      await editProfile(values);
      await load();
      announce(t("saved"));
    });
  if (failure !== null) return <Failure error={failure} onRetry={() => void load()} />;
  if (facts === null) return <p role="status" aria-label={t("loading")}><Spinner /></p>;
  return (
    <>
      {facts.length === 0 && <p class={styles["empty"]}>{t("profile.empty")}</p>}
      {facts.length > 0 && (
        <ul class={styles["facts"]}>
          {facts.map((fact) => (
            <Fact key={`${fact.key}/${fact.since}/${fact.until}`} fact={fact} onChange={change} />
          ))}
        </ul>
      )}
      <NewFact onAdd={(key, value) => change({ [key]: value })} />
      <div class={styles["below"]}>
        <label>
          <input type="checkbox" checked={history} onChange={(event) => setHistory(event.currentTarget.checked)} /> {t("profile.history")}
        </label>
        {facts.length > 0 && <Button tone="danger" onClick={() => setErasing(true)}>{t("profile.erase.all")}</Button>}
      </div>
      {erasing && (
        <Dialog title={t("profile.erase.all")} onClose={() => setErasing(false)}>
          <p>{t("profile.erase.text")}</p>
          <DialogButtons>
            <Button onClick={() => setErasing(false)}>{t("cancel")}</Button>
            <Button
              tone="danger"
              onClick={() => void attempt(async () => (await eraseProfile(null), await load())).then((done) => done && setErasing(false))}
            >
              {t("profile.erase.all")}
            </Button>
          </DialogButtons>
        </Dialog>
      )}
    </>
  );
}

function Fact({ fact, onChange }: { fact: ProfileFact; onChange: (values: Record<string, string | null>) => Promise<boolean> }) {
  const [editing, setEditing] = useState<string | null>(null);
  const past = fact.until !== null;
  const called = named("fact", fact.key);
  const save = async () => {
    if (editing?.trim() && (await onChange({ [fact.key]: editing.trim() }))) setEditing(null);
  };
  return (
    <li data-past={past}>
      <span class={styles["factKey"]}>{called}</span>
      <div>
        {editing === null ? (
          <span class={styles["factValue"]}>{fact.value}</span>
        ) : (
          <form class={styles["inline"]} onSubmit={(event) => (event.preventDefault(), void save())}>
            <TextField value={editing} onInput={setEditing} label={t("profile.value.of", { key: called })} focus />
            <Button type="submit" tone="primary">{t("save")}</Button>
            <Button onClick={() => setEditing(null)}>{t("cancel")}</Button>
          </form>
        )}
        <p class={styles["origin"]}>
          {past ? t("profile.until", { since: moment(fact.since), until: moment(fact.until ?? 0) }) : t("profile.since", { when: moment(fact.since) })}
          {fact.session === null ? (
            <span> · {t("profile.byhand")}</span>
          ) : (
            <button type="button" class={styles["link"]} onClick={() => openConversation(fact.session, fact.turn)}>
              {t("said.there")}
            </button>
          )}
        </p>
      </div>
      {!past && editing === null && (
        <span class={styles["factTools"]}>
          <IconButton icon="edit" label={t("profile.edit", { key: called })} size={16} onClick={() => setEditing(fact.value)} />
          <IconButton icon="trash" label={t("profile.erase", { key: called })} size={16} onClick={() => void onChange({ [fact.key]: null })} />
        </span>
      )}
    </li>
  );
}

function NewFact({ onAdd }: { onAdd: (key: string, value: string) => Promise<boolean> }) {
  const [key, setKey] = useState("");
  const [value, setValue] = useState("");
  const add = async () => {
    if (!(await onAdd(key.trim(), value.trim()))) return;
    setKey("");
    setValue("");
  };
  return (
    <form class={styles["newFact"]} onSubmit={(event) => (event.preventDefault(), void add())}>
      <TextField value={key} onInput={setKey} label={t("profile.key")} placeholder={t("profile.key.example")} />
      <TextField value={value} onInput={setValue} label={t("profile.value")} placeholder={t("profile.value.example")} />
      <Button type="submit" disabled={key.trim() === "" || value.trim() === ""}>{t("profile.add")}</Button>
    </form>
  );
}
