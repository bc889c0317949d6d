/** One conversation in the list; one with branches can be opened to show them. */
import { useState } from "preact/hooks";
import type { Session } from "../api/types";
import { Spinner, IconButton } from "../design/controls";
import { Menu } from "../design/Menu";
import type { Family } from "../state/conversations";
import { openConversation, route } from "../state/route";
import { answeringSessions } from "../state/threads";
import { count, moment, t } from "../text";
import { DeleteDialog, RenameDialog } from "./ConversationDialogs";
import styles from "./sidebar.module.css";

export function FamilyRow({ family, onOpen }: { family: Family; onOpen: () => void }) {
  const [open, setOpen] = useState(false);
  const shown = route.value.view === "chat" ? route.value.session : null;
  const current = family.members.find((each) => each.id === shown) ?? family.members[0] ?? family.root;
  const branches = family.members.length - 1;
  return (
    <li>
      <Row session={current} title={current.title || family.root.title} onOpen={onOpen}>
        {branches > 0 && (
          <IconButton
            icon="branch"
            size={15}
            label={t("branches", { n: count(family.members.length) })}
            expanded={open}
            onClick={() => setOpen(!open)}
          />
        )}
      </Row>
      {open && (
        <ul class={styles["branches"]}>
          {[...family.members]
            .sort((a, b) => a.created_at - b.created_at)
            .map((each) => (
              <li key={each.id}>
                <Row session={each} title={each === family.root ? t("branch.root") : t("branch.at", { when: moment(each.created_at), turn: each.parent?.turn ?? 0 })} onOpen={onOpen} />
              </li>
            ))}
        </ul>
      )}
    </li>
  );
}

function Row(props: { session: Session; title: string | null; onOpen: () => void; children?: preact.ComponentChildren }) {
  const { session } = props;
  const [dialog, setDialog] = useState<"rename" | "delete" | null>(null);
  const shown = route.value.view === "chat" && route.value.session === session.id;
  return (
    <div class={styles["row"]} data-current={shown}>
      <a
        href={`#/c/${encodeURIComponent(session.id)}`}
        aria-current={shown ? "page" : undefined}
        title={moment(session.updated_at)}
        onClick={(event) => {
          if (event.metaKey || event.ctrlKey) return;
          event.preventDefault();
          openConversation(session.id);
          props.onOpen();
        }}
      >
        {props.title || t("conversation.untitled")}
      </a>
      {answeringSessions.value.has(session.id) && <Spinner />}
      {props.children}
      <span class={styles["rowMenu"]}>
        <Menu
          label={t("conversation.menu.of", { title: props.title || t("conversation.untitled") })}
          items={[
            { icon: "edit", label: t("rename"), onClick: () => setDialog("rename") },
            { icon: "trash", label: t("delete"), onClick: () => setDialog("delete"), danger: true },
          ]}
        />
      </span>
      {dialog === "rename" && <RenameDialog session={session} onClose={() => setDialog(null)} />}
      {dialog === "delete" && <DeleteDialog session={session} onClose={() => setDialog(null)} />}
    </div>
  );
}
