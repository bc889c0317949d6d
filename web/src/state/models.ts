/** What can be asked, and the machine that answers. */
import { signal } from "@preact/signals";
import { readMachine, readModels } from "../api/memory";
import type { Machine } from "../api/types";
import { chosenModel } from "./settings";

export const models = signal<readonly { id: string; max_model_len: number }[]>([]);
export const machine = signal<Machine | null>(null);

export async function loadModels(): Promise<void> {
  models.value = await readModels();
}

export async function loadMachine(): Promise<void> {
  machine.value = await readMachine();
}

/** The chosen model while the server has it, else the server's first. */
export function currentModel(): string {
  const known = models.peek().map((each) => each.id);
  const chosen = chosenModel.peek();
  return chosen !== null && known.includes(chosen) ? chosen : (known[0] ?? "");
}
