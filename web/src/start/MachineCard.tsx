/** The model and whether this machine is up to it. */
import { useEffect, useState } from "preact/hooks";
import type { Machine } from "../api/types";
import { Notice, Spinner } from "../design/controls";
import { Icon } from "../design/Icon";
import { loadMachine, machine, models } from "../state/models";
import { bytes, count, inWords, t } from "../text";
import styles from "./start.module.css";

export function MachineCard() {
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    loadMachine().catch(() => setFailed(true));
  }, []);
  const known = machine.value;
  if (known === null && !failed) return <p role="status" aria-label={t("loading")}><Spinner /></p>;
  if (known === null) {
    const model = models.value[0];
    return <p>{model ? t("machine.model.only", { model: model.id, window: count(model.max_model_len) }) : t("machine.unknown")}</p>;
  }
  return (
    <div class={styles["machine"]}>
      <p class={styles["fit"]} data-fit={known.fit ?? "ok"}>
        <Icon name={known.fit === "too_big" || known.fit === "tight" ? "warning" : "check"} size={18} />
        {t(`machine.fit.${known.fit ?? "ok"}`, { model: known.model?.id ?? models.value[0]?.id ?? "" })}
      </p>
      <dl>
        {factsOf(known).map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {(known.checks ?? [])
        .filter((each) => each.state !== "ok")
        .map((each) => (
          <Notice key={each.name} tone="warn">
            <p>{inWords(`machine.check.${each.name}.${each.state}`, each.detail)}</p>
            {each.fix && <code>{each.fix}</code>}
          </Notice>
        ))}
    </div>
  );
}

/** What is known of the machine, as pairs of words. */
function factsOf(known: Machine): [string, string][] {
  const { model, memory, rates, cores } = known;
  const facts: [string, string | null][] = [
    [t("machine.window"), model?.window_tokens ? t("file.tokens", { n: count(model.window_tokens) }) : null],
    [
      t("machine.memory"),
      memory?.total_bytes ? t("machine.memory.value", { free: bytes(memory.free_bytes ?? 0), total: bytes(memory.total_bytes) }) : null,
    ],
    [t("machine.cores"), cores ? count(cores) : null],
    [t("machine.reads"), rates?.prefill_tokens_per_s ? t("machine.rate", { n: count(Math.round(rates.prefill_tokens_per_s)) }) : null],
    [
      t("machine.indeadline"),
      rates?.tokens_within_deadline ? t("file.tokens", { n: count(Math.round(rates.tokens_within_deadline)) }) : null,
    ],
    [t("machine.writes"), rates?.decode_tokens_per_s ? t("machine.rate", { n: count(Math.round(rates.decode_tokens_per_s)) }) : null],
  ];
  return facts.filter((each): each is [string, string] => each[1] !== null);
}
