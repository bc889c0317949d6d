/** The controls that every part of the page uses: buttons, a dialog, a notice, words for screen readers only. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { askForKey, Refused } from "../api/client";
import { t } from "../text";
import { detailsOf, sentenceOf } from "../text/failures";
import { Icon, type IconName } from "./Icon";
import styles from "./controls.module.css";

export function IconButton(props: {
  icon: IconName;
  label: string;
  onClick: () => void;
  pressed?: boolean;
  disabled?: boolean;
  expanded?: boolean;
  size?: number;
}) {
  return (
    <button
      type="button"
      class={styles["icon"]}
      aria-label={props.label}
      title={props.label}
      aria-pressed={props.pressed}
      aria-expanded={props.expanded}
      disabled={props.disabled ?? false}
      onClick={props.onClick}
    >
      <Icon name={props.icon} size={props.size ?? 18} />
    </button>
  );
}

export function Button(props: {
  children: ComponentChildren;
  onClick?: () => void;
  tone?: "plain" | "primary" | "danger";
  type?: "button" | "submit";
  disabled?: boolean;
}) {
  const tone = props.tone ?? "plain";
  return (
    <button
      type={props.type ?? "button"}
      class={`${styles["button"]} ${tone === "plain" ? "" : styles[tone]}`}
      disabled={props.disabled ?? false}
      onClick={props.onClick}
    >
      {props.children}
    </button>
  );
}

export function HiddenText({ children }: { children: ComponentChildren }) {
  return <span class={styles["hiddenText"]}>{children}</span>;
}

export function Spinner() {
  return <span class={styles["spinner"]} aria-hidden="true" />;
}

/** A modal dialog; Escape and the backdrop close it, and the browser gives the focus back. */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const box = useRef<HTMLDialogElement>(null);
  const name = useId();
  useEffect(() => {
    const dialog = box.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog
      ref={box}
      class={styles["dialog"]}
      aria-labelledby={name}
      onCancel={(event) => (event.preventDefault(), onClose())}
      onClick={(event) => event.target === box.current && onClose()}
    >
      <div class={styles["dialogHead"]}>
        <h2 id={name}>{title}</h2>
        <IconButton icon="close" label={t("close")} onClick={onClose} />
      </div>
      <div class={styles["dialogBody"]}>{children}</div>
    </dialog>
  );
}

export function DialogButtons({ children }: { children: ComponentChildren }) {
  return <div class={styles["row"]}>{children}</div>;
}

export function Notice(props: { tone?: "plain" | "warn" | "bad"; children: ComponentChildren; actions?: ComponentChildren }) {
  return (
    <div class={styles["notice"]} data-tone={props.tone ?? "plain"}>
      <Icon name={props.tone && props.tone !== "plain" ? "warning" : "info"} />
      <div>
        {props.children}
        {props.actions && <div class={styles["actions"]}>{props.actions}</div>}
      </div>
    </div>
  );
}

/** An error in the reader's language, the server's own words below, and what can be done about it. */
export function Failure({ error, onRetry }: { error: unknown; onRetry?: (() => void) | null }) {
  const details = detailsOf(error);
  const wantsKey = error instanceof Refused && error.status === 401;
  const enterKey = async () => {
    if ((await askForKey()) !== null) onRetry?.();
  };
  return (
    <div role="alert">
      <Notice
        tone="bad"
        actions={wantsKey ? <Button onClick={() => void enterKey()}>{t("key.enter")}</Button> : onRetry && <Button onClick={onRetry}>{t("retry")}</Button>}
      >
        <p>{sentenceOf(error)}</p>
        {details && (
          <details>
            <summary>{t("error.details")}</summary>
            <span lang="en">{details}</span>
          </details>
        )}
      </Notice>
    </div>
  );
}

export function TextField(props: {
  value: string;
  onInput: (value: string) => void;
  label: string;
  type?: "text" | "password";
  placeholder?: string;
  focus?: boolean;
}) {
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (props.focus) field.current?.select();
  }, []);
  const shared = {
    ref: field,
    class: styles["field"],
    value: props.value,
    placeholder: props.placeholder ?? "",
    "aria-label": props.label,
    autoComplete: "off",
    onInput: (event: { currentTarget: HTMLInputElement }) => props.onInput(event.currentTarget.value),
  };
  return props.type === "password" ? <input {...shared} type="password" /> : <input {...shared} type="text" />;
}
