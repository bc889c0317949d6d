/** What the keyboard can do. */
import { Dialog } from "../design/controls";
import { t } from "../text";
import { dialog } from "./dialogs";
import { SHORTCUTS } from "./shortcuts";
import styles from "./settings.module.css";

export function ShortcutsDialog() {
  return (
    <Dialog title={t("shortcuts")} onClose={() => (dialog.value = null)}>
      <dl class={styles["shortcuts"]}>
        {SHORTCUTS.map(({ keys, does }) => (
          <div key={does}>
            <dt>{t(does)}</dt>
            <dd>
              {keys.map((each) => (
                <kbd key={each}>{each}</kbd>
              ))}
            </dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
