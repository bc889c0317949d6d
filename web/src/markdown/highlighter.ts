/** The highlighting worker: a language and code in, runs of text with their classes out. A bad pattern can only hold up itself. */
import { common, createLowlight } from "lowlight";

/** [kind, text]; the kind is the innermost class of the highlighter, or "". */
export type Run = [string, string];

export interface Job {
  id: number;
  language: string;
  code: string;
}

interface Hast {
  type: string;
  value?: string;
  properties?: { className?: string[] };
  children?: Hast[];
}

const lowlight = createLowlight(common);

function flatten(node: Hast, kind: string, runs: Run[]): void {
  if (node.value !== undefined) runs.push([kind, node.value]);
  const own = node.properties?.className?.[0]?.replace(/^hljs-/, "") ?? kind;
  for (const child of node.children ?? []) flatten(child, own, runs);
}

self.onmessage = ({ data }: MessageEvent<Job>) => {
  const runs: Run[] = [];
  if (lowlight.registered(data.language)) flatten(lowlight.highlight(data.language, data.code) as Hast, "", runs);
  self.postMessage({ id: data.id, runs });
};
