/** Copies a text, and says that it did. */
import { useState } from "preact/hooks";
import { announce } from "../state/announcer";
import { attempt } from "../state/attempt";
import { t } from "../text";
import { IconButton } from "./controls";

export function Copy({ text, label }: { text: () => string; label: string }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    if (!(await attempt(() => copyText(text())))) return; // the browser forbids it
    setDone(true);
    announce(t("copied"));
    setTimeout(() => setDone(false), 1500);
  };
  return <IconButton icon={done ? "check" : "copy"} label={done ? t("copied") : label} size={16} onClick={() => void copy()} />;
}

/** Pages without TLS have no clipboard interface; the old way works there. */
async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
