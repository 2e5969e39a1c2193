// Every call of the client at a gateway, which nothing disturbs: LAPS_SD_TEST_GATEWAYS has its address.

import assert from "node:assert/strict";
import { getEventListeners, once } from "node:events";
import { createServer, type AddressInfo, type Socket } from "node:net";
import { after, test } from "node:test";

import { AlreadyExists, Client, DeadlineExceeded, Explanation_State, FinishReason, InvalidArgument, NotFound, Unavailable, type StreamEvent } from "laps-sd";

const address = process.env["LAPS_SD_TEST_GATEWAYS"] as string;
const client = new Client(address);
after(() => client.close());

const LONG = { maxTokens: 2_000, ignoreEos: true } as const;

async function all(events: AsyncIterable<StreamEvent>): Promise<StreamEvent[]> {
  const found: StreamEvent[] = [];
  for await (const event of events) found.push(event);
  return found;
}

async function requestId(events: AsyncGenerator<StreamEvent>): Promise<string> {
  const { value } = await events.next();
  assert.equal(value?.case, "accepted");
  return value.value.requestId;
}

async function finishReason(id: string): Promise<FinishReason> {
  const explained = await client.explain(id);
  assert.equal(explained.state, Explanation_State.ENDED);
  return explained.finishReason;
}

test("a whole answer and the stream of its request are the same", async () => {
  const options = { maxTokens: 20, seed: 1, ignoreEos: true };
  const answer = await client.generate("Once upon a time", options);
  const events = await all(client.stream("Once upon a time", options));

  assert.equal(answer.tokenIds.length, 20);
  assert.equal(answer.end?.finishReason, FinishReason.LENGTH);
  assert.equal(events[0]?.case, "accepted");
  assert.equal(events.at(-1)?.case, "end");
  assert.equal(events.map((event) => (event.case === "delta" ? event.value.text : "")).join(""), answer.text);
});

test("a key attaches to the request that exists, and another body is refused", async () => {
  const options = { maxTokens: 5, idempotencyKey: "typescript-1" };
  const first = await client.generate("Once", options);
  const again = await client.generate("Once", options);

  assert.deepEqual([again.accepted?.attached, again.accepted?.requestId, again.text], [true, first.accepted?.requestId, first.text]);
  await assert.rejects(client.generate("Twice", options), AlreadyExists);
});

test("a request is resumed by its id, from the start or from a cursor", async () => {
  const options = { maxTokens: 20, seed: 1, idempotencyKey: "typescript-2" };
  const whole = await client.generate("Once upon a time", options);
  const seen = await all(client.resume(whole.accepted!.requestId));
  const deltas = seen.filter((event) => event.case === "delta").map((event) => event.value);
  assert.equal(deltas.map((delta) => delta.text).join(""), whole.text);

  const cursor = { ...deltas[0]!.cursor!, nextToken: 7, textOffset: 0 };
  const rest = await all(client.resume(whole.accepted!.requestId, cursor));

  const ids = rest.flatMap((event) => (event.case === "delta" ? event.value.tokenIds : []));
  assert.deepEqual(ids, whole.tokenIds.slice(7));
});

test("many calls at once bring no warning", async (t) => {
  const warned = t.mock.fn();
  process.on("warning", warned);
  t.after(() => process.off("warning", warned));

  await Promise.all(Array.from({ length: 20 }, (_, n) => client.generate(`Once ${n}`, { maxTokens: 3 })));

  assert.deepEqual(warned.mock.calls.map((call) => String(call.arguments[0])), []);
});

test("many calls with one signal bring no warning and leave nothing with it", async (t) => {
  const warned = t.mock.fn();
  process.on("warning", warned);
  t.after(() => process.off("warning", warned));
  const { signal } = new AbortController();
  const before = Reflect.ownKeys(signal);

  await Promise.all(Array.from({ length: 20 }, (_, n) => client.generate(`Once ${n}`, { maxTokens: 3, signal })));
  await client.models({ signal });

  assert.equal(warned.mock.callCount(), 0);
  assert.deepEqual(getEventListeners(signal, "abort"), []);
  assert.deepEqual(Reflect.ownKeys(signal), before); // Node has there what AbortSignal.any keeps
});

test("calls that fail together all go on at the next address", async (t) => {
  const listen = async () => {
    const server = createServer((socket) => socket.destroy()).listen(0, "127.0.0.1");
    await once(server, "listening");
    return { server, address: `127.0.0.1:${(server.address() as AddressInfo).port}` };
  };
  const [first, third] = [await listen(), await listen()];
  first.server.close();
  const connected = t.mock.fn();
  third.server.on("connection", connected);
  const several = new Client([first.address, address, third.address]);
  t.after(() => {
    several.close();
    third.server.close();
  });

  const found = await Promise.all(Array.from({ length: 5 }, () => several.models()));

  assert.deepEqual(found.map((models) => models.length), [1, 1, 1, 1, 1]);
  assert.equal(connected.mock.callCount(), 0);
});

test("an address that accepts connections and is silent is left for the next, and no call waits for it without end", { timeout: 60_000 }, async (t) => {
  const silent = createServer().listen(0, "127.0.0.1");
  const sockets = new Set<Socket>();
  silent.on("connection", (socket) => sockets.add(socket));
  await once(silent, "listening");
  const mute = `127.0.0.1:${(silent.address() as AddressInfo).port}`;
  const clients = [new Client([mute, address]), new Client(mute, { retryMs: 0 }), new Client(mute)] as const;
  const [both, hasty, only] = clients;
  t.after(() => {
    clients.forEach((one) => one.close());
    sockets.forEach((socket) => socket.destroy());
    silent.close();
  });

  assert.equal((await both.generate("Once", { maxTokens: 3, ignoreEos: true })).tokenIds.length, 3);
  await assert.rejects(hasty.models(), { name: "Unavailable", message: /^no answer to the connection within 2 s$/ });
  await assert.rejects(all(only.stream("Once", { timeoutMs: 50 })), DeadlineExceeded);
  await assert.rejects(only.models({ signal: AbortSignal.timeout(50) }), { name: "TimeoutError" });
  const waits = assert.rejects(only.models(), { name: "Cancelled", message: "the client was closed" });
  only.close();
  await waits;
});

test("leaving the loop cancels the request", async () => {
  let id = "";
  for await (const event of client.stream("A long story", LONG)) {
    if (event.case === "accepted") id = event.value.requestId;
    if (event.case === "delta") break;
  }
  assert.equal(await finishReason(id), FinishReason.CANCELLED);
});

test("aborting the signal cancels the request, and the stream throws the signal's reason", async () => {
  const control = new AbortController();
  const events = client.stream("A long story", { ...LONG, signal: control.signal });
  const id = await requestId(events);

  control.abort(new RangeError("enough"));

  await assert.rejects(all(events), new RangeError("enough"));
  assert.equal(await finishReason(id), FinishReason.CANCELLED);
  await assert.rejects(client.models({ signal: control.signal }), new RangeError("enough"));
});

test("aborting the signal cancels the request while nobody reads its stream", async () => {
  const control = new AbortController();
  const events = client.stream("A long story", { ...LONG, signal: control.signal });
  const id = await requestId(events);

  control.abort();

  for await (const event of client.resume(id)) {
    if (event.case === "end") assert.equal(event.value.finishReason, FinishReason.CANCELLED);
  }
  await assert.rejects(all(events), { name: "AbortError" });
});

test("unless somebody may come back for it", async () => {
  const events = client.stream("A long story", { ...LONG, idempotencyKey: "typescript-3" });
  const id = await requestId(events);
  await events.return();

  assert.notEqual((await client.explain(id)).state, Explanation_State.ENDED);
  assert.equal(await client.cancel(id), true);
  assert.equal(await client.cancel(id), false);
});

test("several outputs of one prompt", async () => {
  const options = { maxTokens: 10, n: 3, seed: 1 };
  const texts = ["", "", ""];
  for await (const event of client.stream("Once upon a time", options)) {
    if (event.case === "delta") texts[event.choice] += event.value.text;
  }
  const answer = await client.generate("Once upon a time", options);

  assert.deepEqual([answer, ...answer.more].map((one) => one.text), texts);
  assert.equal(new Set(texts).size, 3);
});

test("a refusal names the field and the limit, and is not repeated", async () => {
  await assert.rejects(client.generate("Once", { topP: 2 }), (error) => {
    assert.ok(error instanceof InvalidArgument);
    assert.deepEqual(
      error.violations.map(({ field, description }) => [field, description]),
      [["sampling.top_p", "must be above 0 and at most 1, got 2"]],
    );
    assert.equal(error.message, "sampling.top_p must be above 0 and at most 1, got 2");
    return true;
  });
  await assert.rejects(client.explain("s0.unknown"), NotFound);
  await assert.rejects(all(client.resume("s0.unknown")), NotFound);
});

test("the hard deadline ends the call and the request", async () => {
  let id = "";
  await assert.rejects(async () => {
    for await (const event of client.stream("A long story", { ...LONG, timeoutMs: 300 })) {
      if (event.case === "accepted") id = event.value.requestId;
    }
  }, DeadlineExceeded);

  // On a busy machine the deadline may pass before the request is accepted.
  if (id) assert.equal((await client.explain(id)).state, Explanation_State.ENDED);
});

for (const timeoutMs of [Infinity, Number.MAX_SAFE_INTEGER, NaN]) {
  test(`a time limit without end is none: ${timeoutMs}`, async () => {
    assert.equal((await client.models({ timeoutMs })).length, 1);
    assert.equal((await client.generate("Once", { maxTokens: 3, ignoreEos: true, timeoutMs })).tokenIds.length, 3);
  });
}

test("tokens and back, and the models", async () => {
  const ids = await client.tokenize("Once upon a time");
  assert.ok(ids.length > 0);
  assert.equal(await client.detokenize(ids), "Once upon a time");
  assert.ok((await client.tokenize([{ role: "user", content: "hi" }])).length > 0);
  const [model] = await client.models();
  assert.ok(model && model.contextTokens > 0);
});

test("another gateway takes the call of one that is not there", async () => {
  const two = new Client(["127.0.0.1:1", address]);
  assert.equal((await two.generate("Once", { maxTokens: 3, ignoreEos: true })).tokenIds.length, 3);
  two.close();
});

test("the call after one that failed at an address goes to the next", async () => {
  const two = new Client(["127.0.0.1:1", address], { retryMs: 0 });
  await assert.rejects(two.models(), Unavailable);
  assert.equal((await two.models()).length, 1);
  two.close();
});

test("a gateway that is not there is reported when patience ends", async () => {
  const nobody = new Client("127.0.0.1:1", { retryMs: 50 });
  await assert.rejects(nobody.generate("Once"), Unavailable);
  await assert.rejects(nobody.models(), Unavailable);
  nobody.close();
});

test("closing a client ends its streams and cancels their requests", async () => {
  const closed = new Client(address);
  const events = closed.stream("A long story", LONG);
  const id = await requestId(events);
  closed.close();
  await assert.rejects(all(events), { name: "Cancelled", message: "the client was closed" });
  assert.equal(await finishReason(id), FinishReason.CANCELLED);
});

test("closing a client ends its calls that have a signal of their own", async () => {
  const closed = new Client(address);
  const { signal } = new AbortController();
  const events = closed.stream("A long story", { ...LONG, signal });
  await requestId(events);
  closed.close();
  await assert.rejects(all(events), { name: "Cancelled", message: "the client was closed" });
  await assert.rejects(closed.models({ signal }), { name: "Cancelled" });
});

test("this machine is dialled directly, whatever proxy the environment names", async (t) => {
  process.env["grpc_proxy"] = "http://127.0.0.1:1";
  const direct = new Client(address, { retryMs: 0 });
  t.after(() => {
    delete process.env["grpc_proxy"];
    direct.close();
  });
  assert.equal((await direct.models()).length, 1);
});

test("a key that no header can hold is refused, and the error does not have it", () => {
  assert.throws(() => new Client(address, { apiKey: "laps-sd-secret\n" }), (error) => {
    assert.ok(error instanceof TypeError && error.message.includes("a line break at its end"));
    assert.doesNotMatch(error.message, /secret/);
    return true;
  });
});

test("a client needs an address", () => {
  assert.throws(() => new Client([]), TypeError);
});

test("a URL in place of an address is refused with the form to use", () => {
  assert.throws(() => new Client("http://host:50051"), { message: "the address of a gateway is host:port, such as host:50051, got 'http://host:50051'" });
  assert.throws(() => new Client([address, "grpcs://host:443"]), { message: /such as host:443 with tls: \{\}, got/ });
});
