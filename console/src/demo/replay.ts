// A recorded burst (simulator/recording.py): the state of its requests at any time.

import type { Pile } from "../field";
import type { Request, State } from "../model";

type Change = [atS: number, state: State, level: number | null, perceptible: boolean | null, worker: string];

interface Run {
  policy: string;
  changes: Change[][];
  ended_s: number[];
  preempted: number[];
}

export interface Recording {
  workers: number;
  slots: number;
  requests: { arrival_s: number; output_tokens: number }[];
  runs: Run[];
}

export interface Scene {
  requests: Request[];
  pile: Pile;
  /** Mean time from arrival to end of the requests that have ended; 0 before the first. */
  meanS: number;
  medianS: number;
  preemptions: number;
}

export function durationOf(recording: Recording): number {
  return Math.max(...recording.runs.flatMap((run) => run.ended_s));
}

/** What a viewer of the queue sees at a time of the recording. */
export function sceneAt(recording: Recording, run: Run, atS: number): Scene {
  const requests: Request[] = [];
  const times: number[] = [];
  const ends: [endedS: number, id: string][] = [];
  let preemptions = 0;
  recording.requests.forEach((facts, number) => {
    const endedS = run.ended_s[number]!;
    const id = `${number + 1}`;
    if (endedS <= atS) {
      ends.push([endedS, id]);
      times.push(endedS - facts.arrival_s);
      preemptions += run.preempted[number]!;
      return;
    }
    let now: Change | undefined;
    let ranS = 0;
    for (const change of run.changes[number]!) {
      if (change[0] > atS) break;
      if (now?.[1] === "running") ranS += change[0] - now[0];
      now = change;
    }
    if (!now) return;
    const [beganS, state, level, perceptible, worker] = now;
    if (state === "running") ranS += atS - beganS;
    const request = { id, tenant: "", priority: 0, state, level, perceptible };
    requests.push({ ...request, ageS: atS - facts.arrival_s, attainedS: ranS, tokens: 0, worker });
  });
  // The recording has no ranks: by level, and then by arrival.
  requests.sort((one, other) => (one.level ?? 0) - (other.level ?? 0) || other.ageS - one.ageS);
  times.sort((one, other) => one - other);
  return {
    requests,
    pile: { ended: ends.sort((one, other) => one[0] - other[0]).map(([, id]) => id), total: recording.requests.length },
    meanS: times.length ? times.reduce((sum, time) => sum + time, 0) / times.length : 0,
    medianS: times[Math.floor(times.length / 2)] ?? 0,
    preemptions,
  };
}
