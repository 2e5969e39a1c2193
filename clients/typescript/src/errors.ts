// The errors of a call by kind, and which of them another attempt may mend. The same rules as laps_sd/client/failures.py.

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { status, type ServiceError } from "@grpc/grpc-js";

import { BadRequestSchema, RetryInfoSchema, type BadRequest, type RetryInfo } from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";

const DETAILS_KEY = "grpc-status-details-bin";
export const MAX_PAUSE_MS = 1_000;
/**
 * Part of the message of a call that was reset: so a proxy ends the streams of a gateway that died. gRPC makes INTERNAL of it, as a
 * gateway does for a bug, but no message of a gateway has this word.
 */
const RESET = "RST_STREAM";

/** A call that the server refused, or that could not be completed. `code` is the name of the gRPC status. */
export class LapsSdError extends Error {
  constructor(
    message: string,
    readonly code: string = "UNKNOWN",
    options?: ErrorOptions,
  ) {
    super(message, options);
    // Not new.target.name, which a minifier changes.
    this.name = new.target === LapsSdError ? "LapsSdError" : code.toLowerCase().replace(/(?:^|_)(.)/g, (_, first: string) => first.toUpperCase());
  }
}

/** A wrong field of the request, whatever the state of the system. */
export class InvalidArgument extends LapsSdError {
  /** Each wrong field with a sentence about its limit. */
  readonly violations: readonly { readonly field: string; readonly description: string }[];

  constructor(message: string, violations: InvalidArgument["violations"] = [], options?: ErrorOptions) {
    super(message, "INVALID_ARGUMENT", options);
    this.violations = violations;
  }
}

/** A call that may work later. */
class Retryable extends LapsSdError {
  constructor(
    message: string,
    code: string,
    /** Milliseconds after which the server advises to retry; undefined without advice. */
    readonly retryAfterMs?: number,
    options?: ErrorOptions,
  ) {
    super(message, code, options);
  }
}

/** A queue or a tenant's share is full. */
export class ResourceExhausted extends Retryable {
  constructor(message: string, retryAfterMs?: number, options?: ErrorOptions) {
    super(message, "RESOURCE_EXHAUSTED", retryAfterMs, options);
  }
}

/** A part of the system cannot be reached. */
export class Unavailable extends Retryable {
  constructor(message: string, retryAfterMs?: number, options?: ErrorOptions) {
    super(message, "UNAVAILABLE", retryAfterMs, options);
  }
}

/** A request that is unknown, expired, or another tenant's. */
export class NotFound extends LapsSdError {}
/** An idempotency key that belongs to another body. */
export class AlreadyExists extends LapsSdError {}
/** A right request in the wrong state. */
export class FailedPrecondition extends LapsSdError {}
/** A caller without a known key. */
export class Unauthenticated extends LapsSdError {}
/** A known caller without the permission for this call. */
export class PermissionDenied extends LapsSdError {}
/** The hard deadline passed. */
export class DeadlineExceeded extends LapsSdError {}
/** The call was ended on request. */
export class Cancelled extends LapsSdError {}
/** This server does not offer that part of the contract. */
export class Unimplemented extends LapsSdError {}

const KINDS: Partial<Record<status, typeof LapsSdError>> = {
  [status.NOT_FOUND]: NotFound,
  [status.ALREADY_EXISTS]: AlreadyExists,
  [status.FAILED_PRECONDITION]: FailedPrecondition,
  [status.UNAUTHENTICATED]: Unauthenticated,
  [status.PERMISSION_DENIED]: PermissionDenied,
  [status.DEADLINE_EXCEEDED]: DeadlineExceeded,
  [status.CANCELLED]: Cancelled,
  [status.UNIMPLEMENTED]: Unimplemented,
};

/** Returns whether something thrown is a failed call of gRPC; anything else is a mistake in a program. */
export function isFailedCall(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && typeof error.code === "number" && "metadata" in error;
}

/** Returns the error for a failed call. `undefined`: a stream closed without an end. The subject is added to the message. */
export function errorOf(failed: ServiceError | undefined, subject = ""): LapsSdError {
  const about = subject && ` (${subject})`;
  if (failed === undefined) return new Unavailable(`the stream broke off${about}`);
  const text = (failed.details || "the call failed") + about;
  const cause = { cause: failed };
  switch (failed.code) {
    case status.INVALID_ARGUMENT: {
      const found = details(failed).violations;
      const sentence = found.map(({ field, description }) => (field ? `${field} ${description}` : description)).join("; ");
      return new InvalidArgument(sentence || text, found, cause);
    }
    case status.RESOURCE_EXHAUSTED:
      return new ResourceExhausted(text, retryAfterMs(failed), cause);
    case status.UNAVAILABLE:
      return new Unavailable(text, retryAfterMs(failed), cause);
  }
  const name = status[failed.code] ?? "UNKNOWN";
  const kind = KINDS[failed.code];
  return kind ? new kind(text, name, cause) : new LapsSdError(`${name}: ${text}`, name, cause);
}

/** Returns whether another address may answer although this one did not. `undefined`: the stream closed without an end. */
export function isLost(failed: ServiceError | undefined): boolean {
  if (failed === undefined) return true;
  // A server that stops ends its calls with CANCELLED, although no client cancelled them.
  const codes: readonly status[] = [status.UNAVAILABLE, status.CANCELLED];
  return codes.includes(failed.code) || (failed.code === status.INTERNAL && failed.details.includes(RESET));
}

/** Returns whether no server answered, or the answer advises when to retry. */
export function mayWorkLater(failed: ServiceError): boolean {
  return isLost(failed) || (failed.code === status.RESOURCE_EXHAUSTED && retryAfterMs(failed) !== undefined);
}

/**
 * Returns the milliseconds of the pause before the next attempt. It doubles with each attempt, and is at least as long as the
 * server advises; part of it is random, so that clients do not all retry at once.
 */
export function nextPauseMs(failed: ServiceError | undefined, attempts: number): number {
  const advice = (failed && retryAfterMs(failed)) ?? 0;
  return Math.max(advice, Math.min(MAX_PAUSE_MS, 20 * 2 ** Math.min(attempts, 10)) * (0.5 + Math.random() / 2));
}

function retryAfterMs(failed: ServiceError): number | undefined {
  const delay = details(failed).retry?.retryDelay;
  return delay && Number(delay.seconds) * 1_000 + delay.nanos / 1e6;
}

function details(failed: ServiceError): { violations: BadRequest["fieldViolations"]; retry: RetryInfo | undefined } {
  const violations: BadRequest["fieldViolations"] = [];
  let retry: RetryInfo | undefined;
  for (const packed of failed.metadata.get(DETAILS_KEY)) {
    try {
      for (const detail of fromBinary(StatusSchema, packed as Buffer).details) {
        violations.push(...(anyUnpack(detail, BadRequestSchema)?.fieldViolations ?? []));
        retry ??= anyUnpack(detail, RetryInfoSchema);
      }
    } catch {
      // Bytes that are no details count as none; the call has failed in any case.
    }
  }
  return { violations, retry };
}
