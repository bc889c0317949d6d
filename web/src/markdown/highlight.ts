/** Highlighting on demand: the worker is loaded with the first code, and replaced when it takes too long. */
import type { Job, Run } from "./highlighter";

const MAX_CODE_CHARS = 60_000;
const LIMIT_MS = 2_000;

let worker: Worker | null = null;
let next = 0;
const waiting = new Map<number, (runs: Run[]) => void>();

function started(): Worker {
  if (worker === null) {
    worker = new Worker(HIGHLIGHTER);
    worker.onmessage = ({ data }: MessageEvent<{ id: number; runs: Run[] }>) => {
      waiting.get(data.id)?.(data.runs);
      waiting.delete(data.id);
    };
  }
  return worker;
}

/** Everybody who waits stays with plain code, and the next code gets a new worker. */
function giveUp(): void {
  worker?.terminate();
  worker = null;
  for (const answer of waiting.values()) answer([]);
  waiting.clear();
}

/** The runs of some code; none for a language that isn't known, for too much code, and after too long a time. */
export async function highlight(language: string, code: string): Promise<Run[]> {
  if (language === "" || code.length > MAX_CODE_CHARS) return [];
  const id = next++;
  const job: Job = { id, language: language.toLowerCase(), code };
  return new Promise((resolve) => {
    const timer = setTimeout(giveUp, LIMIT_MS);
    waiting.set(id, (runs) => (clearTimeout(timer), resolve(runs)));
    started().postMessage(job);
  });
}
