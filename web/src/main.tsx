/** Starts the page. */
import { effect } from "@preact/signals";
import { render } from "preact";
import "./design/tokens.css";
import "./design/base.css";
import { App } from "./app/App";
import { key, online } from "./api/client";
import { listenToKeys } from "./settings/shortcuts";
import { loadSessions } from "./state/conversations";
import { loadModels, models } from "./state/models";
import { applySettings } from "./state/settings";
import { followAddress } from "./state/route";

const AGAIN_MS = 2_000;

/** Ask for what the page needs; what fails is shown in the sidebar, and an absent server is tried again. */
function load(): void {
  void loadSessions();
  if (models.peek().length === 0) loadModels().catch(() => undefined); // whoever asks a question hears of it
}

applySettings();
followAddress();
listenToKeys();
render(<App />, document.getElementById("page")!);
let begun = false;
key.subscribe((given) => {
  if (!begun || given !== null) load(); // again with another key: without it, all was refused
  begun = true;
});

// Whatever finds the server gone, this finds it again.
let waiting = false;
effect(() => {
  if (online.value || waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    load();
  }, AGAIN_MS);
});
