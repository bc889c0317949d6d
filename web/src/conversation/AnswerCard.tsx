/** The answer card: how the answer came about, in a line; and in full for those who want to know. */
import { useState, useId } from "preact/hooks";
import type { ComponentChildren } from "preact";
import type { Report, Usage } from "../api/types";
import { Icon } from "../design/Icon";
import { openConversation } from "../state/route";
import { count, inWords, named, percent, roughly, seconds, t } from "../text";
import { TokenBar, shownTokens } from "./TokenBar";
import styles from "./card.module.css";

export function AnswerCard({ report, usage }: { report: Report; usage: Usage | null }) {
  const [open, setOpen] = useState(false);
  const id = useId();
  const degradations = report.degradations ?? [];
  return (
    <section class={styles["card"]} aria-label={t("card.label")}>
      <button type="button" class={styles["summary"]} aria-expanded={open} aria-controls={id} onClick={() => setOpen(!open)}>
        <span class={styles["plan"]}>{t(`plan.${report.plan ?? "full"}`)}</span>
        <Times report={report} />
        {report.tokens && report.tokens.offered > 0 && (
          <span class={styles["short"]}>
            <TokenBar tokens={report.tokens} />
            {t("card.share", { share: percent(exactShare(report)) })}
          </span>
        )}
        <span class={styles["chevron"]} data-open={open}>
          <Icon name="below" size={15} />
        </span>
      </button>
      {degradations.length > 0 && (
        <ul class={styles["degradations"]}>
          {degradations.map((each) => (
            <li key={each.code}>
              <Icon name="info" size={15} />
              <span>{inWords(`degraded.${each.code}`, each.reason)}</span>
            </li>
          ))}
        </ul>
      )}
      <div id={id} hidden={!open}>
        {open && <Details report={report} usage={usage} />}
      </div>
    </section>
  );
}

function exactShare(report: Report): number {
  const tokens = report.tokens;
  return tokens && tokens.offered > 0 ? Math.min(1, tokens.exact / tokens.offered) : 1;
}

/** The measured time against the deadline, as words and as a little gauge. */
function Times({ report }: { report: Report }) {
  const measured = report.measured_ttft_s;
  const deadline = report.deadline_s;
  if (measured == null || deadline === undefined) return null;
  const late = measured > deadline;
  return (
    <span class={styles["times"]} data-late={late}>
      <span class={styles["gauge"]} aria-hidden="true">
        <span style={{ inlineSize: `${Math.min(100, (100 * measured) / deadline)}%` }} />
      </span>
      {t(late ? "card.late" : "card.intime", { measured: seconds(measured), deadline: seconds(deadline) })}
    </span>
  );
}

function Details({ report, usage }: { report: Report; usage: Usage | null }) {
  const { tokens, memory } = report;
  return (
    <dl class={styles["details"]}>
      <Row name={t("card.plan")}>{t(`plan.${report.plan ?? "full"}.long`)}</Row>
      {report.deadline_s !== undefined && <Row name={t("card.deadline")}>{seconds(report.deadline_s)}</Row>}
      {report.measured_ttft_s != null && (
        <Row name={t("card.measured")}>
          {seconds(report.measured_ttft_s)}
          {report.predicted_ttft_s !== undefined && ` · ${t("card.predicted", { n: seconds(report.predicted_ttft_s) })}`}
        </Row>
      )}
      {tokens && (
        <Row name={t("card.tokens")}>
          <TokenBar tokens={tokens} wide />
          <ul class={styles["legend"]}>
            {shownTokens(tokens).map(({ kind, n }) => (
              <li key={kind}>
                <span class={styles["swatch"]} data-kind={kind} aria-hidden="true" />
                {t(`tokens.${kind}`, { n: count(n) })}
              </li>
            ))}
          </ul>
        </Row>
      )}
      {tokens && tokens.cached.ram + tokens.cached.disk > 0 && (
        <Row name={t("card.cached")}>
          {t("card.tiers", { ram: count(tokens.cached.ram), disk: count(tokens.cached.disk) })}
        </Row>
      )}
      {report.confidence != null && report.plan === "refined" && <Row name={t("card.confidence")}>{t("card.confidence.value", { share: percent(report.confidence) })}</Row>}
      {report.model && (
        <Row name={t("card.model")}>
          {report.model}
          {report.backend && report.backend !== "local" ? ` · ${report.backend}` : ` · ${t("card.local")}`}
        </Row>
      )}
      {usage && <Row name={t("card.usage")}>{t("card.usage.value", { prompt: count(usage.prompt_tokens), answer: count(usage.completion_tokens) })}</Row>}
      {report.cost != null && <Row name={t("card.cost")}>{count(report.cost)}</Row>}
      {report.answer_cache && <Row name={t("card.again")}>{t("card.again.value", { question: report.answer_cache.question, age: seconds(report.answer_cache.age_s) })}</Row>}
      {report.taken_out && Object.keys(report.taken_out).length > 0 && (
        <Row name={t("card.takenout")}>
          {Object.entries(report.taken_out).map(([kind, n]) => `${named("taken", kind)}: ${count(n)}`).join(", ")}
        </Row>
      )}
      {(report.attempts ?? []).length > 0 && (
        <Row name={t("card.attempts")}>
          {report.attempts?.map((each) => `${each.backend} (${each.model}): ${named("outcome", each.outcome)}, ${seconds(each.seconds)}`).join("; ")}
        </Row>
      )}
      {memory && memory.profile.length + memory.summary.length > 0 && (
        <Row name={t("card.memory")}>
          <ul class={styles["used"]}>
            {memory.profile.map((fact) => (
              <li key={fact.key}>
                {named("fact", fact.key)}: {fact.value}
                {fact.session !== null && (
                  <button type="button" class={styles["link"]} onClick={() => openConversation(fact.session, fact.turn)}>
                    {t("said.there")}
                  </button>
                )}
              </li>
            ))}
            {memory.summary.length > 0 && <li>{t(memory.summary.length === 1 ? "card.summary.one" : "card.summary", { n: roughly(memory.summary.length) })}</li>}
          </ul>
        </Row>
      )}
    </dl>
  );
}

function Row({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}
