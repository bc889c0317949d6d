/** The page's words. Every text is in en.json and in zh.json; a test holds the two to the same keys and places. */
import { language } from "../state/settings";
import en from "./en.json";
import zh from "./zh.json";

export { language };

export type Key = keyof typeof en;

const TEXTS: Record<"en" | "zh", Record<Key, string>> = { en, zh };
const LOCALES = { en: "en-GB", zh: "zh-CN" };

/** The text of a key in the chosen language, with `{name}` filled in. Components that use it follow the language. */
export function t(key: Key, values: Record<string, string | number> = {}): string {
  return TEXTS[language.value][key].replace(/\{(\w+)\}/g, (place, name: string) =>
    name in values ? String(values[name]) : place,
  );
}

export function hasText(key: string): key is Key {
  return key in en;
}

/** What the server says in English, with its figures; in another language our text for what it says, where there is one. */
export function inWords(key: string, servers: string): string {
  return language.value === "en" || !hasText(key) ? servers : t(key);
}

/** What one of the server's codes is called; one that is newer than this page stands for itself. */
export function named(kind: "outcome" | "taken" | "fact", code: string): string {
  const key = `${kind}.${code}`;
  return hasText(key) ? t(key) : code;
}

/** A number with its thousands set apart. */
export function count(n: number): string {
  return new Intl.NumberFormat(LOCALES[language.value]).format(n);
}

/** 12,345 -> 12K: where only the size matters. */
export function roughly(n: number): string {
  return new Intl.NumberFormat(LOCALES[language.value], { notation: "compact", maximumFractionDigits: 1 }).format(n);
}

export function seconds(value: number): string {
  if (value >= 90) return t("time.minutes", { n: count(Math.round(value / 60)) });
  if (value < 0.05) return t("time.instant");
  const digits = value < 10 ? 1 : 0;
  return t("time.seconds", { n: new Intl.NumberFormat(LOCALES[language.value], { maximumFractionDigits: digits }).format(value) });
}

export function bytes(value: number): string {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log(value) / Math.log(1024)));
  const digits = new Intl.NumberFormat(LOCALES[language.value], { maximumSignificantDigits: 3 });
  return `${digits.format(value / 1024 ** power)} ${units[power]}`;
}

export function percent(share: number): string {
  return new Intl.NumberFormat(LOCALES[language.value], { style: "percent", maximumFractionDigits: 0 }).format(share);
}

/** When something was said: the time today, else the day. */
export function moment(at_s: number): string {
  const date = new Date(1000 * at_s);
  const now = new Date();
  const form: Intl.DateTimeFormatOptions =
    date.toDateString() === now.toDateString()
      ? { hour: "2-digit", minute: "2-digit" }
      : date.getFullYear() === now.getFullYear()
        ? { day: "numeric", month: "short" }
        : { day: "numeric", month: "short", year: "numeric" };
  return new Intl.DateTimeFormat(LOCALES[language.value], form).format(date);
}

export function fullMoment(at_s: number): string {
  return new Intl.DateTimeFormat(LOCALES[language.value], { dateStyle: "medium", timeStyle: "short" }).format(1000 * at_s);
}
