// Small pieces that several views use.

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Field, type Missing } from "./field";
import { type Phase, type Request, phaseOf } from "./model";

export const PHASES: Record<Phase, string> = {
  waiting: "waits",
  ready: "waits, perceptible",
  paused: "paused for others",
  running: "runs",
};

export function seconds(value: number): string {
  return value >= 100 ? `${value.toFixed(0)} s` : value >= 10 ? `${value.toFixed(1)} s` : `${value.toFixed(2)} s`;
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(0)} %`;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}

/** Number of requests in each phase. */
export function tally(requests: readonly Request[]): Record<Phase, number> {
  const found = { waiting: 0, ready: 0, paused: 0, running: 0 };
  for (const request of requests) found[phaseOf(request)]++;
  return found;
}

export function Legend() {
  return (
    <ul class="legend">
      {(Object.keys(PHASES) as Phase[]).map((phase) => (
        <li key={phase}>
          <span class={`mark ${phase}`} aria-hidden="true" /> {PHASES[phase]}
        </li>
      ))}
    </ul>
  );
}

/** The picture of a queue. Its text names the counts; the table beside it has the rest. */
export function Picture(props: {
  label: string;
  requests: readonly Request[];
  missing?: Missing;
  onPick?: (id: string) => void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const field = useRef<Field | null>(null);
  useEffect(() => {
    const made = new Field(canvas.current!);
    field.current = made;
    (canvas.current as HTMLCanvasElement & { field?: Field }).field = made;
    return () => made.close();
  }, []);
  useEffect(() => field.current?.show(props.requests, props.missing), [props.requests, props.missing]);
  const counts = tally(props.requests);
  const label = `${props.label}: ${counts.running} running, ${counts.waiting + counts.ready} waiting, ${counts.paused} paused`;
  return (
    <canvas
      ref={canvas}
      class="field"
      role="img"
      aria-label={label}
      onClick={(event) => {
        const id = field.current?.at(event.offsetX, event.offsetY);
        if (id) props.onPick?.(id);
      }}
    />
  );
}

export function Numbers(props: { of: [label: string, value: ComponentChildren][] }) {
  return (
    <dl class="numbers">
      {props.of.map(([label, value]) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Problem(props: { children: ComponentChildren }) {
  return (
    <p class="problem" role="status">
      {props.children}
    </p>
  );
}

export function requestLink(id: string): string {
  return `/console#request/${encodeURIComponent(id)}`;
}
