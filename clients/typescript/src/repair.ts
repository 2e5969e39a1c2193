// How long a call is repeated, and how a broken stream goes on. Pure: time is an argument, in milliseconds.
// The same rules as laps_sd/client/repair.py.

import { randomBytes } from "node:crypto";

import { create } from "@bufbuild/protobuf";
import type { ServiceError } from "@grpc/grpc-js";

import { DeadlineExceeded, LapsSdError, MAX_PAUSE_MS, NotFound, errorOf, mayWorkLater, nextPauseMs } from "./errors.js";
import {
  CursorSchema,
  DeltaSchema,
  GenerateResponseSchema,
  ResumeRequestSchema,
  type Accepted,
  type Cursor,
  type Delta,
  type Ended,
  type GenerateEvent,
  type GenerateRequest,
  type GenerateResponse,
  type ResumeRequest,
} from "./gen/laps_sd/v1/inference_pb.js";

type Part =
  | { readonly case: "accepted"; readonly value: Accepted }
  | { readonly case: "delta"; readonly value: Delta }
  | { readonly case: "end"; readonly value: Ended };

/** An event of a stream. `choice` is the output, among the `n`, that it belongs to. */
export type StreamEvent = Part & { readonly choice: number };

/**
 * A connection that was open for this long has ended the outage before it, although it brought nothing new: a request may wait in
 * the queue for longer than the time limit of an outage, behind a proxy that cuts idle connections.
 */
const HELD_MS = MAX_PAUSE_MS;

/** Time limit for repeating a call that has had no effect yet. */
export class Patience {
  readonly #retryMs: number;
  readonly #deadline: number;
  #until: number | undefined;
  #attempts = 0;

  constructor(retryMs: number, timeoutMs: number | undefined, now: number) {
    this.#retryMs = retryMs;
    this.#deadline = timeoutMs === undefined ? Infinity : now + timeoutMs;
  }

  /** Returns the time left until the caller's deadline; Infinity without a deadline. */
  timeoutMs(now: number): number {
    return Math.max(1, this.#deadline - now);
  }

  /** Returns the pause before the next call. Throws the error if there is to be none. */
  pauseMs(failed: ServiceError, now: number): number {
    this.#attempts += 1;
    const pauseMs = nextPauseMs(failed, this.#attempts);
    this.#until ??= now + this.#retryMs; // not from the call's start: a hanging gateway is noticed late
    if (!mayWorkLater(failed) || now + pauseMs >= Math.min(this.#until, this.#deadline)) throw errorOf(failed);
    return pauseMs;
  }
}

/** Time limits of a stream. */
export interface Limits {
  readonly timeoutMs: number | undefined;
  readonly reconnectMs: number;
  readonly retryMs: number;
}

/** Progress of the outputs of one call, and the repair of a lost connection. */
export class Progress {
  readonly #request: GenerateRequest | ResumeRequest;
  readonly #ownKey: boolean;
  readonly #patience: Patience;
  readonly #deadline: number;
  readonly #reconnectMs: number;
  readonly #outputs: Output[];
  #lostAt: number | undefined;
  #attempts = 0;
  #repeatedAt: number | undefined; // when this connection brought what was known

  /** The request is not changed. One without an idempotency key is sent with one, so that no attempt can run it twice. */
  constructor(request: GenerateRequest | ResumeRequest, limits: Limits, now: number) {
    const generates = request.$typeName === "laps_sd.v1.GenerateRequest";
    this.#ownKey = generates && !request.idempotencyKey;
    this.#request = generates && this.#ownKey ? { ...request, idempotencyKey: randomBytes(16).toString("hex") } : request;
    this.#patience = new Patience(limits.retryMs, limits.timeoutMs, now);
    this.#deadline = limits.timeoutMs === undefined ? Infinity : now + limits.timeoutMs;
    this.#reconnectMs = limits.reconnectMs;
    const count = generates ? Math.max(1, request.n ?? 1) : 1;
    const start = (generates ? undefined : request.cursor) ?? create(CursorSchema);
    this.#outputs = Array.from({ length: count }, () => new Output(start));
  }

  /** Whether every output is on the record: then a lost connection can be repaired. */
  get accepted(): boolean {
    return this.#outputs.every((output) => output.requestId);
  }

  /** Whether every output has ended. */
  get ended(): boolean {
    return this.#outputs.every((output) => output.ended);
  }

  /** The ids of the requests to cancel if the caller leaves now: no client can want the rest. */
  get toCancel(): string[] {
    const keep = this.#request.$typeName === "laps_sd.v1.GenerateRequest" && this.#request.keep;
    if (keep || !this.#ownKey) return [];
    return this.#outputs.filter((output) => output.requestId && !output.ended).map((output) => output.requestId);
  }

  /**
   * Returns the next request: the caller's at first, later one that resumes where the stream broke. Several outputs are found
   * again by their idempotency key, and are sent from the start; `take` drops the events that were read before.
   */
  request(): GenerateRequest | ResumeRequest {
    const [output] = this.#outputs;
    if (output === undefined || this.#outputs.length > 1 || !this.accepted) return this.#request;
    return create(ResumeRequestSchema, { requestId: output.requestId, cursor: output.cursor });
  }

  /** Returns the time left until the deadline; Infinity without one. Throws DeadlineExceeded if none is left. */
  timeoutMs(now: number): number {
    if (now >= this.#deadline) {
      throw new DeadlineExceeded("the deadline passed while the stream was being resumed", "DEADLINE_EXCEEDED");
    }
    return this.#deadline - now;
  }

  /**
   * Returns the caller's event; undefined for one that a repaired stream repeats. Only what is new ends an outage: every connection
   * begins with `accepted`, also one that is cut after it.
   */
  take(message: GenerateEvent, now: number): StreamEvent | undefined {
    const output = this.#outputs[message.choice];
    if (output === undefined) {
      throw new LapsSdError(`the server sent output ${message.choice} of ${this.#outputs.length}`);
    }
    const part = output.take(message);
    if (part === undefined) {
      this.#repeatedAt ??= now;
      return undefined;
    }
    this.#endOutage();
    return { ...part, choice: message.choice };
  }

  /**
   * Returns the pause before the next call. Throws the error if there is to be none, which names the request, so that the caller
   * can resume one that it keeps or that has the caller's key. `undefined`: the stream closed without an end.
   */
  lost(failed: ServiceError | undefined, now: number): number {
    if (failed !== undefined && !this.accepted) return this.#patience.pauseMs(failed, now);
    if (this.#repeatedAt !== undefined && now - this.#repeatedAt >= HELD_MS) this.#endOutage();
    this.#repeatedAt = undefined;
    this.#lostAt ??= now; // not the time of the last message: a hanging gateway is noticed late
    this.#attempts += 1;
    const pauseMs = nextPauseMs(failed, this.#attempts); // a server may advise any
    const mayGoOn = this.accepted && (failed === undefined || mayWorkLater(failed));
    if (!mayGoOn || now + pauseMs - this.#lostAt > this.#reconnectMs) throw errorOf(failed, this.#unfinished());
    return Math.min(pauseMs, Math.max(0, this.#deadline - now));
  }

  #endOutage(): void {
    this.#lostAt = undefined;
    this.#attempts = 0;
  }

  /** Returns the requests of the outputs that have not ended, in words. */
  #unfinished(): string {
    const ids = this.#outputs.filter((output) => output.requestId && !output.ended).map((output) => output.requestId);
    return ids.length ? `${ids.length === 1 ? "request" : "requests"} ${ids.join(", ")}` : "";
  }
}

/** Read position of one output. */
class Output {
  requestId = "";
  cursor: Cursor;
  ended = false;

  constructor(start: Cursor) {
    this.cursor = start;
  }

  /**
   * Returns the new part of a message; undefined if nothing is new. Throws NotFound if the output is not that of the request any more
   * which it began with: the server has lost that one, and has made another of the same key.
   */
  take({ event }: GenerateEvent): Part | undefined {
    if (this.ended) return undefined;
    switch (event.case) {
      case "accepted": {
        const known = this.requestId;
        this.requestId = event.value.requestId;
        if (known && known !== this.requestId) throw new NotFound(`there is no request '${known}'`, "NOT_FOUND");
        return known ? undefined : event;
      }
      case "delta": {
        const unseen = unseenPart(event.value, this.cursor);
        if (unseen?.cursor) this.cursor = unseen.cursor;
        return unseen && { case: "delta", value: unseen };
      }
      case "end":
        this.ended = true;
        return event;
      default:
        return undefined; // an event of a newer server
    }
  }
}

/** Returns the part of a delta after a cursor; undefined if there is none. */
function unseenPart(delta: Delta, cursor: Cursor): Delta | undefined {
  // A cursor counts characters of Unicode, a string of JavaScript halves of them.
  const characters = [...delta.text];
  const seenTokens = delta.tokenIds.length ? cursor.nextToken - delta.firstToken : 0;
  const seenCharacters = cursor.textOffset - ((delta.cursor?.textOffset ?? 0) - characters.length);
  if (seenTokens <= 0 && seenCharacters <= 0) return delta;
  const rest = create(DeltaSchema, {
    text: characters.slice(Math.max(0, seenCharacters)).join(""),
    tokenIds: delta.tokenIds.slice(Math.max(0, seenTokens)),
    firstToken: Math.max(delta.firstToken, cursor.nextToken),
    logprobs: delta.logprobs.slice(Math.max(0, seenTokens)),
  });
  if (delta.cursor) rest.cursor = delta.cursor;
  if (seenTokens <= 0 && delta.promptLogprobs) rest.promptLogprobs = delta.promptLogprobs; // with the first token
  return rest.text || rest.tokenIds.length ? rest : undefined;
}

/** Returns the response of the unary call: choice 0, and the others in `more`. */
export function collect(events: readonly StreamEvent[]): GenerateResponse {
  // One by one, here and below: the arguments of a call are limited, and a long answer has more events and tokens.
  const count = events.reduce((most, event) => Math.max(most, event.choice), 0) + 1;
  const responses = Array.from({ length: count }, () => create(GenerateResponseSchema));
  for (const event of events) {
    const response = responses[event.choice] as GenerateResponse;
    switch (event.case) {
      case "accepted":
        response.accepted = event.value;
        break;
      case "delta":
        response.text += event.value.text;
        for (const token of event.value.tokenIds) response.tokenIds.push(token);
        for (const logprob of event.value.logprobs) response.logprobs.push(logprob);
        if (event.value.promptLogprobs) response.promptLogprobs = event.value.promptLogprobs;
        break;
      case "end":
        response.end = event.value;
    }
  }
  const [first, ...more] = responses as [GenerateResponse, ...GenerateResponse[]];
  first.more = more;
  return first;
}
