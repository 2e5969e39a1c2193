// When a request waited, ran and was paused, from the lines of its story; as `laps-sd explain` has it.

import type { StoryLine } from "./model";

export type Doing = "waiting" | "running" | "paused" | "not recorded";

export interface Span {
  beginS: number;
  endS: number;
  doing: Doing;
}

const BEGINS: Record<string, Doing> = {
  arrived: "waiting",
  leased: "waiting",
  recovered: "waiting",
  requeued: "waiting",
  started: "running",
  resumed: "running",
  paused: "paused",
  left_out: "not recorded",
};

/** The spans in order, in seconds since acceptance; the last ends with the last line, or at `untilS`. */
export function spansOf(story: readonly StoryLine[], untilS: number): Span[] {
  const spans: Span[] = [];
  let doing: Doing = "waiting";
  story.forEach((line, place) => {
    // A paused request that gets a new lease keeps its slot and KV: it is still paused.
    if (!(line.what === "leased" && doing === "paused")) doing = BEGINS[line.what] ?? doing;
    const endS = Math.max(line.at_s, story[place + 1]?.at_s ?? untilS);
    const last = spans.at(-1);
    if (last?.doing === doing) last.endS = endS;
    else if (endS > line.at_s) spans.push({ beginS: line.at_s, endS, doing });
  });
  return spans;
}
