/** Holds a fault of the page where it happened: that part says so and can be shown again; the rest goes on. */
import { Component, type ComponentChildren } from "preact";
import { t } from "../text";
import { Button, Notice } from "./controls";
import styles from "./controls.module.css";

interface Props {
  children: ComponentChildren;
  /** Another value is another chance. */
  of: string;
  /** The page without this part is none: it has to be loaded again. */
  whole?: boolean;
}

export class Boundary extends Component<Props, { fault: unknown }> {
  override state = { fault: null as unknown };

  override componentDidCatch(fault: unknown): void {
    console.error(fault);
    this.setState({ fault });
  }

  override componentDidUpdate(before: Readonly<Props>): void {
    if (before.of !== this.props.of && this.state.fault !== null) this.setState({ fault: null });
  }

  override render(): ComponentChildren {
    if (this.state.fault === null) return this.props.children;
    const again = this.props.whole ? () => location.reload() : () => this.setState({ fault: null });
    return (
      <div role="alert" class={styles["fault"]}>
        <Notice tone="bad" actions={<Button onClick={again}>{t(this.props.whole ? "fault.reload" : "fault.again")}</Button>}>
          <p>{t(this.props.whole ? "fault.page" : "fault.part")}</p>
          <details>
            <summary>{t("fault.details")}</summary>
            <span lang="en">{String(this.state.fault)}</span>
          </details>
        </Notice>
      </div>
    );
  }
}
