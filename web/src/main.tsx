/** Starts the page. */
import { effect } from "@preact/signals";
import { render } from "preact";
import "./design/tokens.css";
import "./design/base.css";
import { App } from "./app/App";
import { online } from "./api/client";
import { listenToKeys } from "./settings/shortcuts";
import { loadSessions } from "./state/conversations";
import { loadModels, models } from "./state/models";
import { applySettings } from "./state/settings";
import { followAddress } from "./state/route";

const AGAIN_MS = 2_000;

/** Ask for what the page needs until it is there: the server may just be starting. */
async function load(): Promise<void> {
  await Promise.all([loadSessions(), models.peek().length === 0 ? loadModels().catch(() => undefined) : undefined]);
  if (models.peek().length === 0 || !online.peek()) setTimeout(() => void load(), AGAIN_MS);
}

applySettings();
followAddress();
listenToKeys();
render(<App />, document.getElementById("page")!);
void load();

// Whatever finds the server gone, this finds it again.
let waiting = false;
effect(() => {
  if (online.value || waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    void load();
  }, AGAIN_MS);
});
