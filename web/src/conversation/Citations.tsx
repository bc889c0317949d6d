/** The passages and turns an answer is from; each opens its page or turn, with the words marked. */
import { useState } from "preact/hooks";
import { isTurnCitation, type Citation } from "../api/types";
import { Icon } from "../design/Icon";
import { excerptOf } from "./excerpt";
import { openCitation, type Origin } from "../state/panel";
import { count, moment, t } from "../text";
import styles from "./card.module.css";

const FIRST = 3;
const QUOTE_CHARS = 320;

export function Citations({ citations, origin }: { citations: readonly Citation[]; origin: Origin }) {
  const [all, setAll] = useState(false);
  const shown = all ? citations : citations.slice(0, FIRST);
  return (
    <section aria-label={t("sources")} class={styles["sources"]}>
      <h3>{t("sources")}</h3>
      <ol>
        {shown.map((citation, index) => (
          <li key={index}>
            <Source citation={citation} number={index + 1} origin={origin} />
          </li>
        ))}
      </ol>
      {citations.length > FIRST && (
        <button type="button" class={styles["link"]} onClick={() => setAll(!all)}>
          {all ? t("sources.fewer") : t("sources.all", { n: count(citations.length) })}
        </button>
      )}
    </section>
  );
}

function Source({ citation, number, origin }: { citation: Citation; number: number; origin: Origin }) {
  const place = isTurnCitation(citation)
    ? t("source.turn", { n: citation.turn, when: citation.at === null ? "" : moment(citation.at) })
    : t("source.page", { name: citation.filename, n: count(citation.page) });
  if (citation.gone) return <span class={styles["source"]}>{t("source.gone")}</span>;
  return (
    <button type="button" class={styles["source"]} onClick={() => openCitation(citation, origin)}>
      <span class={styles["place"]}>
        <span class={styles["number"]} aria-hidden="true">{number}</span>
        <Icon name={isTurnCitation(citation) ? "turn" : "page"} size={15} />
        <span class={styles["placeName"]}>{place}</span>
      </span>
      <Quote citation={citation} origin={origin} />
    </button>
  );
}

/** The sentence that answers stands out from the passage that was read. */
function Quote({ citation, origin }: { citation: Citation; origin: Origin }) {
  const { before, marked, after } = excerptOf(citation.quote, origin.question, origin.answer, QUOTE_CHARS);
  return (
    <span class={styles["quote"]}>
      {before}
      {marked && <mark>{marked}</mark>}
      {after}
    </span>
  );
}
