/** Renaming and deleting a conversation. */
import { useState } from "preact/hooks";
import type { Session } from "../api/types";
import { Button, Dialog, DialogButtons, TextField } from "../design/controls";
import { attempt } from "../state/attempt";
import { rename } from "../state/conversations";
import { openConversation, route } from "../state/route";
import { deleteConversation } from "../state/threads";
import { t } from "../text";

interface Props {
  session: Session;
  onClose: () => void;
}

export function RenameDialog({ session, onClose }: Props) {
  const [title, setTitle] = useState(session.title ?? "");
  const save = async () => {
    if (await attempt(() => rename(session.id, title))) onClose();
  };
  return (
    <Dialog title={t("rename")} onClose={onClose}>
      <form onSubmit={(event) => (event.preventDefault(), void save())}>
        <TextField value={title} onInput={setTitle} label={t("rename.label")} focus />
        <DialogButtons>
          <Button onClick={onClose}>{t("cancel")}</Button>
          <Button type="submit" tone="primary">{t("save")}</Button>
        </DialogButtons>
      </form>
    </Dialog>
  );
}

export function DeleteDialog({ session, onClose }: Props) {
  const remove = async () => {
    const shown = route.peek();
    if (!(await attempt(() => deleteConversation(session.id)))) return;
    if (shown.view === "chat" && shown.session === session.id) openConversation(null);
    onClose();
  };
  return (
    <Dialog title={t("delete.title")} onClose={onClose}>
      <p>{t("delete.text", { title: session.title || t("conversation.untitled") })}</p>
      <DialogButtons>
        <Button onClick={onClose}>{t("cancel")}</Button>
        <Button tone="danger" onClick={() => void remove()}>{t("delete")}</Button>
      </DialogButtons>
    </Dialog>
  );
}
