/** A component that renders again only when a prop is another value. */
import { Component, h, type ComponentType, type VNode } from "preact";

export function memo<P extends object>(inner: ComponentType<P>): ComponentType<P> {
  return class Remembered extends Component<P> {
    override shouldComponentUpdate(next: Readonly<P>): boolean {
      const names = new Set([...Object.keys(this.props), ...Object.keys(next)]);
      const before = this.props as Record<string, unknown>;
      return [...names].some((name) => before[name] !== (next as Record<string, unknown>)[name]);
    }

    override render(): VNode {
      return h(inner as ComponentType<object>, this.props);
    }
  };
}
