/** Runs before the first paint: theme and language as they were chosen, so that nothing flashes. */
import { readStored } from "./state/stored";

const root = document.documentElement;
const theme = readStored("theme");
if (theme === "light" || theme === "dark") root.dataset["theme"] = theme;
const language = readStored("language");
if (language === "en" || language === "zh") root.lang = language;
