/** When the answer has to begin; or the whole text, however long it takes. */
import { HiddenText } from "../design/controls";
import { Icon } from "../design/Icon";
import { within, WITHIN, type Within } from "../state/settings";
import { t } from "../text";
import styles from "./composer.module.css";

export function DeadlineChooser() {
  return (
    <label class={styles["deadline"]} title={t("deadline.title")}>
      <HiddenText>{t("deadline.label")}</HiddenText>
      <select value={within.value} onChange={(event) => (within.value = event.currentTarget.value as Within)}>
        {WITHIN.map((each) => (
          <option key={each} value={each}>
            {t(`deadline.${each}`)}
          </option>
        ))}
      </select>
      <Icon name="below" size={14} />
    </label>
  );
}
