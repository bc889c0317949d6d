/** Markdown as the page shows it: every block is a component that renders again only when its source changes. */
import type { ComponentChildren, VNode } from "preact";
import { memo } from "../design/memo";
import { useState } from "preact/hooks";
import { count, t } from "../text";
import { Code } from "./Code";
import { Formula } from "./Formula";
import { Long } from "./Long";
import { MAX_BLOCK_CHARS, parse, type Branch, type Node } from "./parse";
import styles from "./markdown.module.css";

/** More blocks, and more cells of a table, than this are shown on demand. */
const MANY_BLOCKS = 300;
const MANY_CELLS = 1_000;
/** Without any white space it is no prose, and a browser takes long to find where its line could break. */
const TANGLE = /(?<![!-~])[!-~]{4000}/;

export function Markdown({ settled, last }: { settled: readonly string[]; last: string }) {
  const [limit, setLimit] = useState(MANY_BLOCKS);
  return (
    <div class={styles["markdown"]}>
      {settled.slice(0, limit).map((source, index) => (
        <Block key={index} source={source} growing={false} />
      ))}
      {last !== "" && settled.length <= limit && <Block key={settled.length} source={last} growing={true} />}
      {settled.length > limit && (
        <button type="button" class={styles["more"]} onClick={() => setLimit(limit + MANY_BLOCKS)}>
          {t("long.blocks", { rest: settled.length - limit })}
        </button>
      )}
    </div>
  );
}

const Block = memo(function Block({ source, growing }: { source: string; growing: boolean }) {
  if ((source.length > MAX_BLOCK_CHARS || TANGLE.test(source)) && !isCode(source)) return <Long text={source} />;
  return <>{shownAll(parse(source), growing)}</>;
});

/** A long fence is harmless: its text is one node. */
function isCode(source: string): boolean {
  return source.length < 8 * MAX_BLOCK_CHARS && /^ {0,3}(```|~~~)/.test(source);
}

function shownAll(nodes: readonly Node[], growing: boolean): ComponentChildren[] {
  return nodes.map((node, index) => shown(node, index, growing));
}

function shown(node: Node, key: number, growing: boolean): ComponentChildren {
  switch (node.kind) {
    case "text":
      return node.text;
    case "break":
      return <br key={key} />;
    case "rule":
      return <hr key={key} />;
    case "code":
      return <code key={key}>{node.text}</code>;
    case "fence":
      return <Code key={key} language={node.info} code={node.text} growing={growing} />;
    case "formula":
      return <Formula key={key} tex={node.text} display={node.info === "display"} />;
    case "branch":
      return branch(node, key, growing);
  }
}

/** A table's head and as many rows as a browser lays out at once; the others on demand. */
function Table({ parts, growing }: { parts: readonly Node[]; growing: boolean }) {
  const [limit, setLimit] = useState(MANY_CELLS);
  const [head, body] = parts.map((each) => (each.kind === "branch" ? each.children : []));
  const rows = body ?? [];
  const columns = head?.[0]?.kind === "branch" ? head[0].children.length : 1;
  const fit = Math.max(1, Math.floor(limit / Math.max(1, columns)));
  return (
    <>
      <div class={styles["table"]} tabIndex={0} role="region" aria-label={t("table.label")}>
        <table>
          <thead>{shownAll(head ?? [], growing)}</thead>
          {rows.length > 0 && <tbody>{shownAll(rows.slice(0, fit), growing)}</tbody>}
        </table>
      </div>
      {rows.length > fit && (
        <button type="button" class={styles["more"]} onClick={() => setLimit(limit + MANY_CELLS)}>
          {t("long.rows", { rest: count(rows.length - fit) })}
        </button>
      )}
    </>
  );
}

/** The elements a text may make; another tag of the parser shows its content only. Headings go below the page's own. */
function branch(node: Branch, key: number, growing: boolean): VNode {
  if (node.tag === "table") return <Table key={key} parts={node.children} growing={growing} />;
  const inside = shownAll(node.children, growing);
  switch (node.tag) {
    case "a":
      if (node.detail === "") return <span key={key}>{inside}</span>;
      return (
        <a key={key} href={node.detail} target="_blank" rel="noopener noreferrer nofollow" title={node.detail}>
          {inside}
        </a>
      );
    case "h1":
    case "h2":
      return <h3 key={key}>{inside}</h3>;
    case "h3":
      return <h4 key={key}>{inside}</h4>;
    case "h4":
    case "h5":
    case "h6":
      return <h5 key={key}>{inside}</h5>;
    case "ol":
      return <ol key={key} start={Number(node.detail) || 1}>{inside}</ol>;
    case "td":
      return <td key={key} data-align={node.detail}>{inside}</td>;
    case "th":
      return <th key={key} data-align={node.detail}>{inside}</th>;
    case "p":
      return <p key={key}>{inside}</p>;
    case "ul":
      return <ul key={key}>{inside}</ul>;
    case "li":
      return <li key={key}>{inside}</li>;
    case "blockquote":
      return <blockquote key={key}>{inside}</blockquote>;
    case "em":
      return <em key={key}>{inside}</em>;
    case "strong":
      return <strong key={key}>{inside}</strong>;
    case "s":
      return <s key={key}>{inside}</s>;
    case "tr":
      return <tr key={key}>{inside}</tr>;
    default:
      return <span key={key}>{inside}</span>;
  }
}
