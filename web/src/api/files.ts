/** Documents: upload with progress, the state of their ingest, their pages. */
import { authorised, call, json, Refused, refusedOf, Unreachable } from "./client";
import type { FileObject, FilePage } from "./types";

const PAGE = 1000;

function path(id: string): string {
  return `/v1/files/${encodeURIComponent(id)}`;
}

/** Send a file; `told` hears the share that has left. fetch tells nothing of uploads, so this is an XMLHttpRequest. */
export function upload(file: File, told: (share: number) => void, signal: AbortSignal): Promise<FileObject> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("file", file, file.name);
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(authorised())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => told(event.lengthComputable ? event.loaded / event.total : 0);
    request.onerror = () => reject(new Unreachable("The upload broke off."));
    request.onabort = () => reject(new DOMException("Cancelled.", "AbortError"));
    request.onload = () => {
      if (request.status === 200) resolve(JSON.parse(request.responseText) as FileObject);
      else reject(refusedOf(request.status, request.responseText));
    };
    signal.addEventListener("abort", () => request.abort(), { once: true });
    request.send(form);
  });
}

export function readFile(id: string): Promise<FileObject> {
  return json(path(id));
}

interface Files {
  data: FileObject[];
  has_more: boolean;
  last_id: string | null;
}

/** All of them, the newest first. */
export async function listFiles(): Promise<FileObject[]> {
  const found: FileObject[] = [];
  for (let after = ""; ; ) {
    const page: Files = await json(`/v1/files?limit=${PAGE}${after}`);
    found.push(...page.data);
    if (!page.has_more || page.last_id === null) return found;
    after = `&after=${encodeURIComponent(page.last_id)}`;
  }
}

export async function newestFiles(limit: number): Promise<FileObject[]> {
  return (await json<Files>(`/v1/files?limit=${limit}`)).data;
}

export function deleteFile(id: string): Promise<unknown> {
  return json(path(id), { method: "DELETE" });
}

export function readPage(id: string, page: number, signal: AbortSignal): Promise<FilePage> {
  return json(`${path(id)}/pages/${page}`, { signal });
}

/** The page as a picture (PDF only), behind the key, so it comes as a blob. */
export async function pageImage(id: string, page: number, width: number, signal: AbortSignal): Promise<Blob> {
  return (await call(`${path(id)}/pages/${page}/image?width=${width}`, { signal })).blob();
}

/** Whether an error says that the file is gone. */
export function isGone(error: unknown): boolean {
  return error instanceof Refused && error.status === 404;
}
