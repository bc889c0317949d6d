/** A button with a menu. The browser closes it on Escape and on a click elsewhere; arrow keys move in it. */
import { useId, useRef, useState } from "preact/hooks";
import { Icon, type IconName } from "./Icon";
import styles from "./controls.module.css";

export interface MenuItem {
  icon: IconName;
  label: string;
  onClick: () => void;
  danger?: boolean;
}

export function Menu({ label, items }: { label: string; items: readonly MenuItem[] }) {
  const id = useId();
  const list = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const [open, setOpen] = useState(false);

  const place = () => {
    const from = button.current?.getBoundingClientRect();
    if (!list.current || !from) return;
    const size = list.current.getBoundingClientRect();
    const below = from.bottom + 4 + size.height < innerHeight;
    list.current.style.top = `${below ? from.bottom + 4 : from.top - 4 - size.height}px`;
    list.current.style.left = `${Math.max(8, Math.min(from.right - size.width, innerWidth - size.width - 8))}px`;
    list.current.style.visibility = "visible"; // it isn't seen before it is in its place
    list.current.querySelector("button")?.focus();
  };
  const move = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !list.current) return;
    event.preventDefault();
    const all = [...list.current.querySelectorAll("button")];
    const at = all.indexOf(document.activeElement as HTMLButtonElement);
    all[(at + step + all.length) % all.length]?.focus();
  };
  return (
    <>
      <button
        ref={button}
        type="button"
        class={styles["icon"]}
        aria-label={label}
        title={label}
        aria-haspopup="menu"
        aria-expanded={open}
        popovertarget={id}
      >
        <Icon name="more" />
      </button>
      <div
        ref={list}
        id={id}
        class={styles["menu"]}
        role="menu"
        aria-label={label}
        popover="auto"
        onToggle={(event) => {
          const shown = event.newState === "open";
          setOpen(shown);
          if (shown) place();
          else if (list.current) list.current.style.visibility = "";
        }}
        onKeyDown={move}
      >
        {items.map((item) => (
          <button
            key={item.label}
            type="button"
            role="menuitem"
            class={`${styles["item"]} ${item.danger ? styles["danger"] : ""}`}
            onClick={() => {
              list.current?.hidePopover();
              item.onClick();
            }}
          >
            <Icon name={item.icon} size={17} />
            {item.label}
          </button>
        ))}
      </div>
    </>
  );
}
