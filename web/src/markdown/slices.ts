/** Work in slices: some of it each frame, so that thousands of formulas don't hold the page up. Nothing of what it is. */

const BUDGET_MS = 8;

export class Slices {
  private readonly waiting = new Set<() => void>();

  /** Done in its turn; the function that is given back takes it off the list. */
  add(job: () => void): () => void {
    if (this.waiting.size === 0) requestAnimationFrame(() => this.work());
    this.waiting.add(job);
    return () => this.waiting.delete(job);
  }

  private work(): void {
    const end = performance.now() + BUDGET_MS;
    for (const job of this.waiting) {
      this.waiting.delete(job);
      job();
      if (performance.now() > end) break;
    }
    if (this.waiting.size > 0) requestAnimationFrame(() => this.work());
  }
}
