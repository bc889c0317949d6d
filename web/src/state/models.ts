/** What can be asked, and the machine that answers. */
import { signal } from "@preact/signals";
import { Refused } from "../api/client";
import { readMachine, readModels } from "../api/memory";
import type { Machine } from "../api/types";
import { chosenModel } from "./settings";

export const models = signal<readonly { id: string; max_model_len: number }[]>([]);
export const machine = signal<Machine | null>(null);

let reading: Promise<void> | null = null;

/** Read the list, once for all who wait for it. Throws what reading throws; whoever asks next reads again. */
export function loadModels(): Promise<void> {
  reading ??= readModels()
    .then((found) => void (models.value = found))
    .finally(() => (reading = null));
  return reading;
}

/** The server hasn't what it had when the list was read: whoever asks next reads it again. */
export function forgetModels(): void {
  models.value = [];
}

export async function loadMachine(): Promise<void> {
  machine.value = await readMachine();
}

/** The chosen model while the server has it, else the server's first; waits until the list is known. */
export async function modelToAsk(): Promise<string> {
  if (models.peek().length === 0) await loadModels();
  const known = models.peek().map((each) => each.id);
  const chosen = chosenModel.peek();
  const model = chosen !== null && known.includes(chosen) ? chosen : known[0];
  if (model === undefined) throw new Refused(404, "model_not_found", "");
  return model;
}
