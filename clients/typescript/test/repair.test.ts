// How calls are repeated and streams go on: the same sentences as of the Python client.

import assert from "node:assert/strict";
import { once } from "node:events";
import { constants, createServer } from "node:http2";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { create, toBinary } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import { Metadata, status, type ServiceError } from "@grpc/grpc-js";

import { InvalidArgument, ResourceExhausted, Unavailable, errorOf, isFailedCall } from "../src/errors.js";
import { RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import { Gateway } from "../src/gateway.js";
import {
  CursorSchema,
  GenerateEventSchema,
  GenerateRequestSchema,
  Inference,
  ResumeRequestSchema,
  type GenerateEvent,
} from "../src/gen/laps_sd/v1/inference_pb.js";
import { Progress, collect, type StreamEvent } from "../src/repair.js";
import { makeRequest, type Options } from "../src/request.js";

const PATIENT = { timeoutMs: undefined, reconnectMs: 30_000, retryMs: 30_000 };

function failure(code: status, metadata = new Metadata(), details = ""): ServiceError {
  return Object.assign(new Error(status[code]), { code, details, metadata });
}

/** A gateway's refusal with a retry delay. */
function fullFor(ms: number): ServiceError {
  const retryDelay = { seconds: BigInt(Math.floor(ms / 1000)), nanos: (ms % 1000) * 1e6 };
  const details = [anyPack(RetryInfoSchema, create(RetryInfoSchema, { retryDelay }))];
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, create(StatusSchema, { code: 8, details }))));
  return failure(status.RESOURCE_EXHAUSTED, metadata);
}

function accepted(requestId = "s0.r", choice = 0): GenerateEvent {
  return create(GenerateEventSchema, { choice, event: { case: "accepted", value: { requestId } } });
}

/** A delta of tokens 100, 101 … from a position on, whose text ends at a character. */
function delta(firstToken: number, count: number, text: string, endsAt: number, choice = 0): GenerateEvent {
  const tokenIds = Array.from({ length: count }, (_, at) => 100 + firstToken + at);
  const cursor = { nextToken: firstToken + count, textOffset: endsAt };
  return create(GenerateEventSchema, { choice, event: { case: "delta", value: { text, tokenIds, firstToken, cursor } } });
}

function ended(choice = 0): GenerateEvent {
  return create(GenerateEventSchema, { choice, event: { case: "end", value: {} } });
}

function take(progress: Progress, ...messages: GenerateEvent[]): StreamEvent[] {
  return messages.map((message) => progress.take(message, 0)).filter((event) => event !== undefined);
}

/** Loses a stream again and again, each time after what a connection brings, until that throws. */
function loseUntilItFails(progress: Progress, failed: ServiceError | undefined, ...brings: GenerateEvent[]): void {
  let now = 0;
  for (let attempts = 0; attempts < 1_000; attempts += 1) {
    now += progress.lost(failed, now);
    for (const message of brings) progress.take(message, now);
  }
}

test("a request without a key gets one, and every attempt has the same", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  const first = progress.request();
  assert.equal(first.$typeName, "laps_sd.v1.GenerateRequest");
  assert.match(first.idempotencyKey, /^[0-9a-f]{32}$/);

  progress.lost(failure(status.UNAVAILABLE), 1);

  assert.equal(progress.request(), first);
});

test("a message that is sent twice is two requests", () => {
  const message = makeRequest("x");
  const keys = [message, message].map((one) => new Progress(one, PATIENT, 0).request()).map((one) => "idempotencyKey" in one && one.idempotencyKey);
  assert.equal(new Set(keys).size, 2);
  assert.deepEqual(message, makeRequest("x"));
});

for (const code of [status.UNAVAILABLE, status.CANCELLED]) {
  test(`what nobody answered is tried again: ${status[code]}`, () => {
    assert.ok(new Progress(makeRequest("x"), PATIENT, 0).lost(failure(code), 1_000) > 0);
  });
}

test("an output whose request is lost does not go on with that of another, and one that has ended gets nothing of it", () => {
  const progress = new Progress(makeRequest("x", { n: 2 }), PATIENT, 0);
  take(progress, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 0), ended(0));
  progress.lost(undefined, 0);

  assert.deepEqual(take(progress, accepted("s0.c", 0), delta(1, 1, "b", 2, 0), ended(0)), []);
  assert.throws(() => take(progress, accepted("s0.d", 1)), { name: "NotFound", message: "there is no request 's0.b'" });
  assert.deepEqual(progress.toCancel, ["s0.d"]);
});

for (const how of ["by a reset, as nginx", "without a status, as HAProxy"]) {
  test(`a stream that a proxy cuts is tried again: ${how}`, async () => {
    const proxy = createServer().on("stream", (stream) => {
      stream.on("error", () => {}); // the reset
      stream.respond({ "content-type": "application/grpc" });
      if (how.includes("reset")) stream.close(constants.NGHTTP2_INTERNAL_ERROR);
      else stream.end();
    });
    await once(proxy.listen(0, "127.0.0.1"), "listening");
    const gateway = new Gateway(`127.0.0.1:${(proxy.address() as AddressInfo).port}`, undefined, new Metadata());
    const limits = { timeoutMs: Infinity, signal: new AbortController().signal };
    const events = gateway.stream(Inference.method.generateStream, makeRequest("x"), limits);
    const failed = await events.next().catch((error: unknown) => error);
    gateway.close();
    proxy.close();

    assert.ok(isFailedCall(failed), String(failed));
    assert.ok(new Progress(makeRequest("x"), PATIENT, 0).lost(failed, 1_000) > 0);
  });
}

test("a bug of a gateway is not tried again", () => {
  const bug = failure(status.INTERNAL, new Metadata(), "internal error, incident 0a1b2c3d");
  assert.throws(() => new Progress(makeRequest("x"), PATIENT, 0).lost(bug, 1_000), { name: "LapsSdError", code: "INTERNAL" });
});

test("what is wrong is not tried again", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  assert.throws(() => progress.lost(failure(status.INVALID_ARGUMENT), 1_000), { name: "InvalidArgument", code: "INVALID_ARGUMENT" });
});

test("before a request is accepted, a call is repeated for retryMs from its first loss on", () => {
  const lost = failure(status.UNAVAILABLE);
  const progress = new Progress(makeRequest("x"), { ...PATIENT, retryMs: 5_000 }, 0);
  assert.ok(progress.lost(lost, 25_000) > 0);
  assert.ok(progress.lost(lost, 29_000) > 0);
  assert.throws(() => progress.lost(lost, 31_000), Unavailable);

  const hurried = new Progress(makeRequest("x"), { ...PATIENT, timeoutMs: 25_000, retryMs: 5_000 }, 0);
  assert.throws(() => hurried.lost(lost, 25_000), Unavailable);
});

test("the time to reconnect begins when the loss is noticed, however long it was silent before", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  take(progress, accepted());

  assert.ok(progress.lost(undefined, 61_000) > 0);
  assert.ok(progress.lost(undefined, 90_000) > 0);
  assert.throws(() => progress.lost(undefined, 91_001), Unavailable);
});

for (const failed of [undefined, failure(status.UNAVAILABLE)]) {
  test(`connections that only repeat what is known do not end an outage: ${failed?.code}`, () => {
    const one = new Progress(makeRequest("x"), PATIENT, 0);
    take(one, accepted(), delta(0, 2, "ab", 2));
    const two = new Progress(makeRequest("x", { n: 2 }), PATIENT, 0);
    const known = [accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 1)];
    take(two, ...known);

    assert.throws(() => loseUntilItFails(one, failed, accepted()), { name: "Unavailable", message: / \(request s0\.r\)$/ });
    assert.throws(() => loseUntilItFails(two, failed, ...known), { name: "Unavailable", message: / \(requests s0\.a, s0\.b\)$/ });
  });
}

test("a connection that brings a token ends the outage", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  take(progress, accepted());
  progress.lost(undefined, 0);
  progress.lost(undefined, 28_000);
  take(progress, accepted(), delta(0, 1, "a", 1));

  assert.ok(progress.lost(undefined, 31_000) > 0);
  assert.throws(() => progress.lost(undefined, 62_000), Unavailable);
});

test("a connection that held while the request waited in the queue ends the outage", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  take(progress, accepted());
  progress.lost(undefined, 1_000);
  progress.take(accepted(), 2_000);

  assert.ok(progress.lost(undefined, 60_000) > 0);
  assert.ok(progress.lost(undefined, 89_000) > 0);
  assert.throws(() => progress.lost(undefined, 91_000), Unavailable);
});

test("a request that waits behind a proxy that cuts idle connections is not given up", () => {
  for (const cutAfterMs of [1_500, 3_000, 60_000]) {
    const progress = new Progress(makeRequest("x"), PATIENT, 0);
    let now = 0;
    for (let cut = 0; cut < 100; cut++) {
      progress.take(accepted(), now);
      now += cutAfterMs;
      now += progress.lost(undefined, now);
    }
  }
});

test("a full gateway that a lost stream comes to is asked again when it says", () => {
  const progress = new Progress(makeRequest("x"), { ...PATIENT, retryMs: 0 }, 0);
  take(progress, accepted());

  assert.equal(progress.lost(fullFor(2_500), 2_000), 2_500);
  assert.throws(
    () => progress.lost(fullFor(2_500), 33_000),
    (error) => error instanceof ResourceExhausted && error.retryAfterMs === 2_500,
  );
});

test("details that are none leave the error what it is", () => {
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff]));
  const progress = new Progress(makeRequest("x"), PATIENT, 0);

  assert.throws(() => progress.lost(failure(status.INVALID_ARGUMENT, metadata), 1_000), InvalidArgument);
});

test("no advice makes a lost stream wait beyond its time to reconnect or its deadline", () => {
  const progress = new Progress(makeRequest("x"), { ...PATIENT, timeoutMs: 5_000 }, 0);
  take(progress, accepted());

  assert.equal(progress.lost(fullFor(20_000), 2_000), 3_000);
  assert.throws(() => progress.lost(fullFor(31_000), 2_000), ResourceExhausted);
});

test("without time to reconnect a lost stream ends", () => {
  const progress = new Progress(makeRequest("x"), { ...PATIENT, reconnectMs: 0 }, 0);
  take(progress, accepted());

  assert.throws(() => progress.lost(undefined, 2_000), Unavailable);
});

test("the deadline holds while a stream is being resumed", () => {
  const progress = new Progress(makeRequest("x"), { ...PATIENT, timeoutMs: 1_000 }, 0);
  assert.equal(progress.timeoutMs(400), 600);
  assert.throws(() => progress.timeoutMs(1_000), { name: "DeadlineExceeded" });
});

test("a lost stream resumes at the cursor of its last delta, and the caller gets nothing twice", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  take(progress, accepted(), delta(0, 2, "ab", 2));

  progress.lost(failure(status.UNAVAILABLE), 1_000);
  const resume = progress.request();
  const events = take(progress, accepted(), delta(1, 3, "bcd", 4), delta(1, 3, "bcd", 4), ended(), ended());

  assert.deepEqual(resume, create(ResumeRequestSchema, { requestId: "s0.r", cursor: create(CursorSchema, { nextToken: 2, textOffset: 2 }) }));
  assert.deepEqual(
    events.map((event) => (event.case === "delta" ? [event.value.text, event.value.tokenIds, event.value.firstToken] : event.case)),
    [["cd", [102, 103], 2], "end"],
  );
  assert.ok(progress.ended);
});

test("text is cut by characters of Unicode, as its cursor counts them", () => {
  const progress = new Progress(makeRequest("x"), PATIENT, 0);
  take(progress, accepted(), delta(0, 1, "🦀a", 2));

  const [event] = take(progress, delta(0, 2, "🦀a🦀é", 4));

  assert.equal(event?.case === "delta" && event.value.text, "🦀é");
});

test("several outputs are found again by their key, from the start", () => {
  const progress = new Progress(makeRequest("x", { n: 2 }), PATIENT, 0);
  const request = progress.request();
  take(progress, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 1));

  progress.lost(failure(status.UNAVAILABLE), 1_000);
  const events = take(progress, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 2, "ab", 2, 1), delta(0, 1, "x", 1, 0), ended(0), ended(1));

  assert.equal(progress.request(), request);
  assert.deepEqual(
    events.map((event) => [event.choice, event.case === "delta" ? event.value.text : event.case]),
    [[1, "b"], [0, "x"], [0, "end"], [1, "end"]],
  );
  assert.throws(() => progress.take(accepted("s0.c", 2), 0), /the server sent output 2 of 2/);
});

test("a caller that leaves cancels what nobody can come back for", () => {
  const cancelled = (options: Options) => {
    const progress = new Progress(makeRequest("x", { n: 2, ...options }), PATIENT, 0);
    take(progress, accepted("s0.a", 0), accepted("s0.b", 1), ended(0));
    return progress.toCancel;
  };
  assert.deepEqual(cancelled({}), ["s0.b"]);
  assert.deepEqual(cancelled({ keep: true }), []);
  assert.deepEqual(cancelled({ idempotencyKey: "mine" }), []);
  assert.deepEqual(new Progress(create(ResumeRequestSchema, { requestId: "s0.a" }), PATIENT, 0).toCancel, []);
});

test("a whole answer has the first output, and the others in `more`", () => {
  const progress = new Progress(makeRequest("x", { n: 2 }), PATIENT, 0);
  const answer = collect(
    take(progress, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "x", 1, 0), delta(0, 1, "a", 1, 1), delta(1, 1, "b", 2, 1), ended(0), ended(1)),
  );
  assert.deepEqual([answer.text, answer.accepted?.requestId, answer.tokenIds], ["x", "s0.a", [100]]);
  assert.deepEqual(answer.more.map((one) => [one.text, one.accepted?.requestId, one.tokenIds]), [["ab", "s0.b", [100, 101]]]);
});

test("a request says what the caller said and no more", () => {
  const made = (prompt: Parameters<typeof makeRequest>[0], options?: Options) => {
    const { $typeName, ...fields } = makeRequest(prompt, options);
    return fields;
  };
  const plain = (init: Parameters<typeof create<typeof GenerateRequestSchema>>[1]) => {
    const { $typeName, ...fields } = create(GenerateRequestSchema, init);
    return fields;
  };
  const text = { case: "text", value: "hi" } as const;
  assert.deepEqual(made("hi"), plain({ prompt: text }));
  assert.deepEqual(made([1, 2]), plain({ prompt: { case: "tokenIds", value: { ids: [1, 2] } } }));
  assert.deepEqual(
    made([{ role: "user", content: "hi" }], { continueFinalMessage: true }),
    plain({ prompt: { case: "messages", value: { messages: [{ role: "user", content: "hi" }], continueFinalMessage: true } } }),
  );
  assert.deepEqual(
    made("hi", { maxTokens: 3, temperature: 0, seed: 0, stop: ["x"], badWordsIds: [[1, 2]], topK: undefined } as Options),
    plain({ prompt: text, sampling: { maxTokens: 3, temperature: 0, seed: 0n, stop: ["x"], badWordsIds: [{ ids: [1, 2] }] } }),
  );
  assert.deepEqual(
    made("hi", { timeLimitMs: 1500, keep: true, logprobs: 0, priority: -1, deadline: new Date(Date.UTC(2030, 0, 1)) }),
    plain({ prompt: text, timeLimitMs: 1500, keep: true, logprobs: 0, priority: -1, deadlineUnixMs: 1_893_456_000_000n }),
  );
  assert.deepEqual(made("hi", { speculation: 4, drafter: "lookup" }), plain({ prompt: text, speculation: { mode: 1, maxDraftTokens: 4, drafter: 2 } }));
  assert.deepEqual(made("hi", { speculation: "off" }), plain({ prompt: text, speculation: { mode: 2 } }));
  assert.deepEqual(
    made("hi", { outputFormat: { jsonSchema: { type: "object" } } }),
    plain({ prompt: text, outputFormat: { format: { case: "jsonSchema", value: '{"type":"object"}' } } }),
  );
  assert.deepEqual(
    made("hi", { stop: "END", badWords: "no" }),
    plain({ prompt: text, sampling: { stop: ["END"], badWords: ["no"] } }),
  );
  const parts = [{ role: "user", content: [{ type: "text", text: "hi" }] }] as unknown as Parameters<typeof makeRequest>[0];
  assert.throws(() => makeRequest(parts), { name: "TypeError", message: "the content of a message must be a text" });
  assert.throws(() => makeRequest("hi", { maxToken: 3 } as Options), /unknown option maxToken/);
  assert.throws(() => makeRequest("hi", { continueFinalMessage: true }), /continueFinalMessage: only for a prompt of chat messages/);
});

test("only failed calls are taken for such", () => {
  assert.ok(isFailedCall(failure(status.NOT_FOUND)));
  assert.ok(!isFailedCall(new TypeError("a mistake")));
  assert.equal(errorOf(failure(status.DATA_LOSS)).code, "DATA_LOSS");
});

test("the name of an error is that of its kind, also where a minifier has renamed the class", () => {
  for (const code of Object.values(status)) {
    if (typeof code !== "number" || code === status.OK) continue;
    const error = errorOf(failure(code));
    assert.equal(error.name, error.constructor.name);
  }
  class a extends Unavailable {}
  assert.equal(new a("gone").name, "Unavailable");
});

test("an answer may have more events than a call has arguments", () => {
  const progress = new Progress(makeRequest("x", { n: 2 }), PATIENT, 0);
  const [event] = take(progress, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 1)).slice(-1);

  const answer = collect(Array<StreamEvent>(200_000).fill(event as StreamEvent));

  assert.equal(answer.more[0]?.text.length, 200_000);
});
