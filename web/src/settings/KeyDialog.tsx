/** Asks for the key that the server wants, once a tab. */
import { useState } from "preact/hooks";
import { keyWanted } from "../api/client";
import { Button, Dialog, DialogButtons, TextField } from "../design/controls";
import { t } from "../text";

export function KeyDialog() {
  const [typed, setTyped] = useState("");
  const wanted = keyWanted.value;
  if (!wanted) return null;
  const answer = (key: string | null) => {
    setTyped("");
    wanted.answer(key);
  };
  return (
    <Dialog title={t("key.title")} onClose={() => answer(null)}>
      <form onSubmit={(event) => (event.preventDefault(), answer(typed.trim() || null))}>
        <p>{t(wanted.wrong ? "key.wrong" : "key.text")}</p>
        <TextField type="password" value={typed} onInput={setTyped} label={t("settings.key")} placeholder="pl-…" focus />
        <DialogButtons>
          <Button type="submit" tone="primary" disabled={typed.trim() === ""}>{t("key.use")}</Button>
        </DialogButtons>
      </form>
    </Dialog>
  );
}
