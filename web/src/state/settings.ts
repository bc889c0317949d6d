/** What somebody chose for this browser: language, theme, how long to wait, what may be used. */
import { effect, signal } from "@preact/signals";
import { readStored, writeStored } from "./stored";

export type Language = "en" | "zh";
export type Theme = "system" | "light" | "dark";

/** Seconds until the answer has to begin, or the whole text, however long it takes. */
export type Within = "5" | "15" | "60" | "full";

export const WITHIN: readonly Within[] = ["5", "15", "60", "full"];

function oneOf<T extends string>(name: string, values: readonly T[], otherwise: T): T {
  const stored = readStored(name);
  return values.find((value) => value === stored) ?? otherwise;
}

function browserLanguage(): Language {
  return typeof navigator !== "undefined" && navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export const language = signal<Language>(oneOf("language", ["en", "zh"], browserLanguage()));
export const theme = signal<Theme>(oneOf("theme", ["system", "light", "dark"], "system"));
export const within = signal<Within>(oneOf("within", WITHIN, "5"));
export const useProfile = signal(readStored("profile") !== "no");
export const chosenModel = signal<string | null>(readStored("model"));

/** Keep the choices, and let the document follow them. Called once, by the page. */
export function applySettings(): void {
  const root = document.documentElement;
  effect(() => {
    root.lang = language.value;
    writeStored("language", language.value);
  });
  effect(() => {
    if (theme.value === "system") delete root.dataset["theme"];
    else root.dataset["theme"] = theme.value;
    writeStored("theme", theme.value === "system" ? null : theme.value);
  });
  effect(() => writeStored("within", within.value));
  effect(() => writeStored("profile", useProfile.value ? null : "no"));
  effect(() => writeStored("model", chosenModel.value));
}
