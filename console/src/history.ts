// The course of the last minutes, from the snapshots that this page has received.

import type { Snapshot } from "./model";

const KEPT = 300;
/** Requests whose ages at their end are kept for the percentiles. */
const ENDS = 200;
/** Seconds without a snapshot, of which one comes a second, that are a gap in the charts. */
const GAP_S = 5;

export interface Moment {
  /** Undefined, as the figures of workers, where a shard was unknown or the page received nothing. */
  running?: number;
  waiting?: number;
  /** Of all workers together; undefined where they are not shown. */
  tokensPerS?: number;
  /** Weighted by the workers' tokens per second. */
  acceptance?: number;
  /** Age at which requests ended recently, in seconds; undefined before the first end. */
  medianS?: number;
  slowestTenthS?: number;
}

export class History {
  readonly moments: Moment[] = [];
  private ages = new Map<string, number>();
  private readonly ends: number[] = [];
  private lastS = Infinity;

  /** Adds a snapshot that was received now, a time in seconds. */
  add(snapshot: Snapshot, nowS = performance.now() / 1000): void {
    const missedS = Math.min(KEPT, Math.round(nowS - this.lastS));
    if (missedS >= GAP_S) this.moments.push(...Array.from({ length: missedS - 1 }, () => ({})));
    this.lastS = nowS;
    const requests = snapshot.shards.flatMap((shard) => shard.requests);
    const whole = snapshot.shards.every((shard) => shard.complete && !shard.problem);
    const ages = new Map(requests.map((request) => [request.id, request.ageS]));
    if (whole) {
      for (const [id, ageS] of this.ages) if (!ages.has(id)) this.ends.push(ageS);
      this.ends.splice(0, this.ends.length - ENDS);
    }
    this.ages = whole ? ages : new Map();
    const workers = snapshot.seesAll ? snapshot.shards.flatMap((shard) => shard.workers ?? []) : [];
    const tokensPerS = workers.reduce((sum, worker) => sum + worker.tokens_per_s, 0);
    const accepted = workers.reduce((sum, worker) => sum + worker.tokens_per_s * worker.acceptance, 0);
    const running = requests.filter((request) => request.state === "running").length;
    const known = snapshot.shards.every((shard) => shard.policy !== undefined);
    this.moments.push({
      ...(known && { running, waiting: requests.length - running }),
      tokensPerS: snapshot.seesAll && known ? tokensPerS : undefined,
      acceptance: tokensPerS > 0 ? accepted / tokensPerS : undefined,
      medianS: quantile(this.ends, 0.5),
      slowestTenthS: quantile(this.ends, 0.9),
    });
    this.moments.splice(0, this.moments.length - KEPT);
  }
}

export function quantile(values: readonly number[], share: number): number | undefined {
  if (!values.length) return undefined;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
