// What the gateway sends, and what the views show.

export type State = "queued" | "listed" | "running";

/** An unfinished request, as its scheduler ranks it. */
export interface Request {
  id: string;
  tenant: string;
  priority: number;
  state: State;
  /** null: the policy has no levels. */
  level: number | null;
  /** null: the policy does not use it. */
  perceptible: boolean | null;
  ageS: number;
  attainedS: number;
  tokens: number;
  worker: string;
}

export interface Worker {
  id: string;
  name: string;
  device: string;
  connected: boolean;
  draining: boolean;
  slots: number;
  running: number;
  listed: number;
  blocks: number;
  free_blocks: number;
  rounds: number;
  tokens: number;
  acceptance: number;
  tokens_per_s: number;
}

export interface Shard {
  shard: string;
  /** Why there is nothing to see, or what is wrong; a sentence. */
  problem?: string;
  /** Missing: no scheduler answered, and nothing of the shard is known. */
  policy?: string;
  /** False: there are more requests than these. */
  complete?: boolean;
  /** Of all tenants; only operators get it, and `workers`. */
  total?: number;
  workers?: Worker[];
  requests: Request[];
}

export interface Snapshot {
  seesAll: boolean;
  shards: Shard[];
}

type Row = [string, string, number, State, number | null, boolean | null, number, number, number, string];

interface SentSnapshot {
  sees_all: boolean;
  columns: string[];
  shards: (Omit<Shard, "requests"> & { requests: Row[] })[];
}

export function readSnapshot(text: string): Snapshot {
  const sent = JSON.parse(text) as SentSnapshot;
  return {
    seesAll: sent.sees_all,
    shards: sent.shards.map((shard) => ({ ...shard, requests: shard.requests.map(readRow) })),
  };
}

function readRow(row: Row): Request {
  const [id, tenant, priority, state, level, perceptible, ageS, attainedS, tokens, worker] = row;
  return { id, tenant, priority, state, level, perceptible, ageS, attainedS, tokens, worker };
}

/** Paused for others: it ran before, and does not run now. */
export function isPaused(request: Request): boolean {
  return request.state !== "running" && request.attainedS > 0;
}

export type Phase = "waiting" | "ready" | "paused" | "running";

/** How a request is drawn. `ready`: it waits, and its remaining time can be told (perceptible). */
export function phaseOf(request: Request): Phase {
  if (request.state === "running") return "running";
  if (isPaused(request)) return "paused";
  return request.perceptible ? "ready" : "waiting";
}

export interface StoryLine {
  at_s: number;
  what: string;
  detail: string;
}

/** The answer of /console/api/requests/ID; see Explanation in inference.proto. */
export interface Explanation {
  request_id: string;
  state: string;
  policy: string;
  level?: number;
  ahead: number;
  perceptible?: boolean;
  remaining_s: number;
  remaining_low_s: number;
  remaining_high_s: number;
  basis: string;
  attained_s: number;
  rounds: number;
  drafted: number;
  accepted: number;
  emitted_tokens: number;
  preemptions: number;
  story: StoryLine[];
  finish_reason: string;
  tenant: string;
  worker_id: string;
  ordered_by: string;
  waits_for: string;
  age_s: number;
}
