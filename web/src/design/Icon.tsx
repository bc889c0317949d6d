/** The page's own line icons, 24 × 24. Decoration only: what they mean is said beside them or by their button. */

const PATHS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14ZM20 20l-4-4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11.5l-8.2 8.2a5 5 0 0 1-7-7l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7l-8.4 8.4a1.7 1.7 0 0 1-2.4-2.4l7.7-7.7",
  close: "M6 6l12 12M18 6L6 18",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M19 12a7 7 0 1 1-2.1-5M19 4v4h-4",
  edit: "M5 19l1-4L16.5 4.5l3 3L9 18l-4 1Z",
  branch: "M7 4v10M7 14a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM17 4a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM17 10c0 4-6 3-9 5",
  up: "M8 20H5v-9h3m0 9h8.2a2 2 0 0 0 2-1.6l1.3-6a2 2 0 0 0-2-2.4H14l.6-4a1.8 1.8 0 0 0-3.3-1.2L8 11v9Z",
  down: "M16 4h3v9h-3m0-9H7.800a2 2 0 0 0-2 1.600l-1.300 6a2 2 0 0 0 2 2.400H10l-.6 4a1.800 1.800 0 0 0 3.300 1.200L16 13V4Z",
  page: "M7 3h7l4 4v14H7zM14 3v4h4M10 12h5M10 16h5",
  turn: "M5 5h14v10H10l-5 4z",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  below: "M6 9.5l6 6 6-6",
  latest: "M12 5v13M6 12.500l6 6 6-6",
  settings: "M4 7h9m4 0h3M4 12h3m4 0h9M4 17h11m4 0h1M15 5v4M9 10v4M17 15v4",
  memory: "M12 4a8 8 0 1 0 8 8M12 8v4l3 2M17 3l1 2.500 2.500 1-2.500 1L17 10l-1-2.500-2.500-1 2.500-1z",
  menu: "M4 7h16M4 12h16M4 17h16",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 10.500l5 5 5-5M5 20h14",
  keys: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8",
  info: "M12 20a8 8 0 1 0 0-16 8 8 0 0 0 0 16ZM12 11v5M12 8h.01",
  warning: "M12 4l9 16H3zM12 10v4M12 17h.01",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  goOn: "M5 12h13M13 7l5 5-5 5",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 18 }: { name: IconName; size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} fill={name === "stop" ? "currentColor" : "none"} />
    </svg>
  );
}

/** The orbit whose nearest point the name is. */
export function Mark({ size = 26 }: { size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 32 32" fill="none" aria-hidden="true" focusable="false">
      <ellipse cx="16" cy="16" rx="14" ry="8.5" transform="rotate(-24 16 16)" stroke="var(--accent)" stroke-width="1.8" />
      <circle cx="12" cy="17.8" r="4.6" fill="var(--ink-faint)" opacity="0.5" />
      <circle cx="3.2" cy="21.7" r="2.2" fill="var(--gold)" />
    </svg>
  );
}
