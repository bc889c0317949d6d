/** Small actions that may fail: their error is shown for all to see, at the foot of the page. */
import { signal } from "@preact/signals";

export const mishap = signal<unknown>(null);

/** Whether it went well. */
export async function attempt(action: () => Promise<unknown>): Promise<boolean> {
  try {
    await action();
    mishap.value = null;
    return true;
  } catch (error) {
    mishap.value = error;
    return false;
  }
}
