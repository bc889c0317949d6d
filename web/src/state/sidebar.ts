/** Whether the list of conversations is open, where the screen is too narrow to show it always. */
import { signal } from "@preact/signals";

export const sidebarOpen = signal(false);
