/** What is found for a search: conversations by title, then turns and passages of documents by what they say. */
import { useEffect, useState } from "preact/hooks";
import { search } from "../api/sessions";
import type { Hit } from "../api/types";
import { Failure } from "../design/controls";
import { Icon } from "../design/Icon";
import { documentOf } from "../state/documents";
import { openPanel } from "../state/panel";
import { openConversation } from "../state/route";
import { sessions, sessionOf } from "../state/conversations";
import { count, t } from "../text";
import styles from "./sidebar.module.css";

const WAIT_MS = 250;
const TITLES = 8;

export function SearchResults({ query, onOpen }: { query: string; onOpen: () => void }) {
  const [hits, setHits] = useState<readonly Hit[] | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  useEffect(() => {
    const leaving = new AbortController();
    const timer = setTimeout(() => {
      search(query, leaving.signal).then(
        (found) => (setHits(found), setFailure(null)),
        (error) => leaving.signal.aborted || setFailure(error),
      );
    }, WAIT_MS);
    return () => (clearTimeout(timer), leaving.abort());
  }, [query]);
  const wanted = query.toLocaleLowerCase();
  const titles = (sessions.value ?? []).filter((each) => each.title?.toLocaleLowerCase().includes(wanted)).slice(0, TITLES);
  return (
    <div aria-live="polite">
      {titles.length > 0 && (
        <section>
          <h2>{t("search.titles")}</h2>
          <ul>
            {titles.map((each) => (
              <li key={each.id}>
                <button type="button" class={styles["hit"]} onClick={() => (openConversation(each.id), onOpen())}>
                  {each.title}
                </button>
              </li>
            ))}
          </ul>
        </section>
      )}
      {failure !== null && <Failure error={failure} />}
      {hits === null && failure === null && <p class={styles["empty"]}>{t("search.busy")}</p>}
      {hits !== null && hits.length === 0 && titles.length === 0 && <p class={styles["empty"]}>{t("search.nothing")}</p>}
      {hits !== null && hits.length > 0 && (
        <section>
          <h2>{t("search.said")}</h2>
          <ul>
            {hits.map((hit, index) => (
              <li key={index}>
                <HitRow hit={hit} query={query} onOpen={onOpen} />
              </li>
            ))}
          </ul>
        </section>
      )}
    </div>
  );
}

function HitRow({ hit, query, onOpen }: { hit: Hit; query: string; onOpen: () => void }) {
  if (hit.object === "session.turn") {
    const title = sessionOf(hit.session)?.title || t("conversation.untitled");
    return (
      <button type="button" class={styles["hit"]} onClick={() => (openConversation(hit.session, hit.turn), onOpen())}>
        <span class={styles["where"]}>
          <Icon name="turn" size={14} /> {title}
        </span>
        <Snippet text={hit.text} query={query} />
      </button>
    );
  }
  const known = documentOf(hit.file_id).value;
  const filename = known.state === "known" ? known.file.filename : "";
  const open = () => {
    openPanel({ kind: "page", fileId: hit.file_id, filename, page: hit.page, mark: { start: hit.start, end: hit.end }, origin: null });
    onOpen();
  };
  return (
    <button type="button" class={styles["hit"]} onClick={open}>
      <span class={styles["where"]}>
        <Icon name="page" size={14} /> {t("source.page", { name: filename, n: count(hit.page) })}
      </span>
      <Snippet text={hit.text} query={query} />
    </button>
  );
}

const BEFORE = 50;
const LENGTH = 160;

/** The neighbourhood of the first word that was searched for. */
export function snippetOf(text: string, query: string): { before: string; found: string; after: string } {
  const flat = text.replace(/\s+/g, " ").trim();
  const words = query.split(/\s+/).filter((word) => word.length > 1 || /\p{Script=Han}/u.test(word));
  const low = flat.toLocaleLowerCase();
  const places = words.map((word) => ({ at: low.indexOf(word.toLocaleLowerCase()), size: word.length })).filter(({ at }) => at >= 0);
  const first = places.sort((a, b) => a.at - b.at)[0];
  if (!first || low.length !== flat.length) return { before: flat.slice(0, LENGTH), found: "", after: "" };
  const from = Math.max(0, first.at - BEFORE);
  return {
    before: (from > 0 ? "…" : "") + flat.slice(from, first.at),
    found: flat.slice(first.at, first.at + first.size),
    after: flat.slice(first.at + first.size, from + LENGTH),
  };
}

function Snippet({ text, query }: { text: string; query: string }) {
  const { before, found, after } = snippetOf(text, query);
  return (
    <span class={styles["snippet"]}>
      {before}
      {found && <mark>{found}</mark>}
      {after}
    </span>
  );
}
