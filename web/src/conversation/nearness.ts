/**
 * Tells turns when they come near the visible part, a few per frame, so that a fast scroll never waits for them.
 * What was near once stays as it is: its height is known then, and nothing moves.
 */
import type { RefObject } from "preact";

const MARGIN = "1200px 0px";
const BUDGET_MS = 8;

type Told = (near: boolean) => void;

export class Nearness {
  private observer: IntersectionObserver | null = null;
  private readonly listeners = new Map<Element, Told>();
  private readonly queue = new Set<Element>();
  private frame = 0;

  constructor(private readonly root: RefObject<Element | null>) {}

  watch(element: Element, told: Told): () => void {
    this.observer ??= new IntersectionObserver((seen) => this.seen(seen), { root: this.root.current, rootMargin: MARGIN });
    this.listeners.set(element, told);
    this.observer.observe(element);
    return () => this.forget(element);
  }

  close(): void {
    this.observer?.disconnect();
    cancelAnimationFrame(this.frame);
    this.queue.clear();
  }

  private forget(element: Element): void {
    this.listeners.delete(element);
    this.queue.delete(element);
    this.observer?.unobserve(element);
  }

  private seen(entries: readonly IntersectionObserverEntry[]): void {
    for (const each of entries) {
      if (each.isIntersecting) this.queue.add(each.target);
      else this.queue.delete(each.target); // scrolled past before its turn came
    }
    if (this.queue.size > 0 && this.frame === 0) this.frame = requestAnimationFrame(() => void this.work());
  }

  private async work(): Promise<void> {
    this.frame = 0;
    const end = performance.now() + BUDGET_MS;
    // The ones nearest to the end of the page first: that is where a conversation is opened.
    for (const element of [...this.queue].reverse()) {
      const told = this.listeners.get(element);
      this.forget(element);
      told?.(true);
      await rendered();
      if (performance.now() > end) break;
    }
    if (this.queue.size > 0) this.frame = requestAnimationFrame(() => void this.work());
  }
}

/** Preact renders what was told in a microtask: only behind it is known what it cost. */
async function rendered(): Promise<void> {
  await null;
}
