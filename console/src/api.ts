// Calls of the gateway, with the viewer's key.

import { type Explanation, type Snapshot, readSnapshot } from "./model";

const KEY = "laps-sd-key";
/** Before a view reads again what it could not read. */
export const RETRY_MS = 5000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
/** A stream of snapshots that brings none for so long is dead, although no error was reported: one comes a second. */
const SILENCE_MS = 15_000;

/** A refusal of the gateway, or that it cannot be reached (status 0). */
export class CallError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }

  /** Whether the same call may succeed later. */
  get passes(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** The key is kept until the tab is closed. */
export function savedKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const key = savedKey();
  try {
    if (key) headers.set("Authorization", `Bearer ${key}`);
  } catch {
    throw new CallError("the key has a character that no key has", 401);
  }
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new CallError("The gateway cannot be reached.", 0);
  }
  if (!response.ok) throw new CallError(await reasonOf(response), response.status);
  return response;
}

async function reasonOf(response: Response): Promise<string> {
  try {
    const body = (await response.json()) as { error?: { message?: string } };
    return body.error?.message ?? response.statusText;
  } catch {
    return response.statusText || `status ${response.status}`;
  }
}

/** Yields the data of server-sent events until the stream ends. */
export async function* events(response: Response): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** Reports snapshots until aborted; connects again after a failure, except where a key is needed. */
export async function watch(
  signal: AbortSignal,
  onSnapshot: (snapshot: Snapshot) => void,
  onFailure: (error: CallError) => void,
): Promise<void> {
  let pauseMs = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    const silence = new AbortController();
    const later = () => setTimeout(() => silence.abort(), SILENCE_MS);
    let timer = later();
    try {
      const either = AbortSignal.any([signal, silence.signal]);
      for await (const data of events(await call("/console/api/events", { signal: either }))) {
        clearTimeout(timer);
        timer = later();
        onSnapshot(readSnapshot(data));
        pauseMs = FIRST_PAUSE_MS;
      }
    } catch (error) {
      if (signal.aborted) return;
      const failure = error instanceof CallError ? error : new CallError("The connection broke.", 0);
      onFailure(failure);
      if (!failure.passes) return;
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}

export async function explain(id: string): Promise<Explanation> {
  const response = await call(`/console/api/requests/${encodeURIComponent(id)}`);
  return (await response.json()) as Explanation;
}
