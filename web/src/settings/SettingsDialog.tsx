/** Language, look, deadline, what may be used of the user, the key. */
import { useState } from "preact/hooks";
import { key } from "../api/client";
import { Button, Dialog, TextField } from "../design/controls";
import { models } from "../state/models";
import { chosenModel, language, theme, useProfile, within, WITHIN, type Language, type Theme, type Within } from "../state/settings";
import { t } from "../text";
import { dialog } from "./dialogs";
import styles from "./settings.module.css";

export function SettingsDialog() {
  const [typed, setTyped] = useState("");
  return (
    <Dialog title={t("settings")} onClose={() => (dialog.value = null)}>
      <div class={styles["settings"]}>
        <Choice
          label={t("settings.language")}
          value={language.value}
          options={[["en", "English"], ["zh", "中文"]]}
          onChange={(value) => (language.value = value as Language)}
        />
        <Choice
          label={t("settings.theme")}
          value={theme.value}
          options={(["system", "light", "dark"] as const).map((each) => [each, t(`theme.${each}`)])}
          onChange={(value) => (theme.value = value as Theme)}
        />
        <Choice
          label={t("settings.deadline")}
          value={within.value}
          options={WITHIN.map((each) => [each, t(`deadline.${each}`)])}
          onChange={(value) => (within.value = value as Within)}
        />
        {models.value.length > 1 && (
          <Choice
            label={t("settings.model")}
            value={chosenModel.value ?? models.value[0]?.id ?? ""}
            options={models.value.map((each) => [each.id, each.id])}
            onChange={(value) => (chosenModel.value = value)}
          />
        )}
        <label class={styles["check"]}>
          <input type="checkbox" checked={useProfile.value} onChange={(event) => (useProfile.value = event.currentTarget.checked)} />
          <span>
            {t("settings.profile")}
            <small>{t("settings.profile.hint")}</small>
          </span>
        </label>
        <form
          class={styles["key"]}
          onSubmit={(event) => {
            event.preventDefault();
            key.value = typed.trim() || null;
            setTyped("");
          }}
        >
          <span>{t("settings.key")}</span>
          <div>
            <TextField type="password" value={typed} onInput={setTyped} label={t("settings.key")} placeholder={t(key.value === null ? "settings.key.none" : "settings.key.set")} />
            <Button type="submit" disabled={typed.trim() === ""}>{t("save")}</Button>
            {key.value !== null && <Button onClick={() => (key.value = null)}>{t("settings.key.forget")}</Button>}
          </div>
          <small>{t("settings.key.hint")}</small>
        </form>
      </div>
    </Dialog>
  );
}

function Choice(props: { label: string; value: string; options: readonly (readonly [string, string])[]; onChange: (value: string) => void }) {
  return (
    <label class={styles["choice"]}>
      <span>{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
        {props.options.map(([value, words]) => (
          <option key={value} value={value}>
            {words}
          </option>
        ))}
      </select>
    </label>
  );
}
