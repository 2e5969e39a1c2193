// A gateway is killed while its clients read: LAPS_SD_TEST_GATEWAYS has two addresses, LAPS_SD_TEST_PID the process of the first.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type AddressInfo, type Socket } from "node:net";
import { after, test } from "node:test";

import { Client, Unavailable, type Cursor, type StreamEvent } from "laps-sd";

const [first, second] = (process.env["LAPS_SD_TEST_GATEWAYS"] as string).split(",") as [string, string];
const kill = () => process.kill(Number(process.env["LAPS_SD_TEST_PID"]), "SIGKILL");
const STORY = { maxTokens: 120, seed: 1, ignoreEos: true } as const;

const one = new Client(first, { reconnectMs: 0 });
const two = new Client([first, second]);
/** Accepts connections and never answers, as a host that hangs. */
const silent = createServer((socket) => sockets.add(socket)).listen(0, "127.0.0.1");
const sockets = new Set<Socket>();
await once(silent, "listening");
const three = new Client([first, `127.0.0.1:${(silent.address() as AddressInfo).port}`, second]);
after(() => {
  [one, two, three].forEach((client) => client.close());
  sockets.forEach((socket) => socket.destroy());
  silent.close();
});

/** Puts together what the streams of one request gave. */
class Read {
  texts = ["", ""];
  tokens: number[][] = [[], []];
  shape = new Set<string>();
  id = "";
  cursor: Cursor | undefined;

  add(event: StreamEvent): void {
    const name = `${event.case} ${event.choice}`;
    assert.ok(event.case === "delta" || !this.shape.has(name), `${name} came twice`);
    this.shape.add(name);
    if (event.case === "accepted") this.id = event.value.requestId;
    if (event.case !== "delta") return;
    this.texts[event.choice] += event.value.text;
    this.tokens[event.choice]!.push(...event.value.tokenIds);
    this.cursor = event.value.cursor;
  }
}

test("a killed gateway costs a pause, and no token is lost or comes twice", async () => {
  // Six ways to read, which are lost together.
  const [single, several, kept, past] = [new Read(), new Read(), new Read(), new Read()];
  const streams = [
    { read: single, events: two.stream("A long story", STORY) },
    { read: several, events: two.stream("Two stories", { ...STORY, n: 2 }) },
    { read: kept, events: one.stream("A kept story", { ...STORY, idempotencyKey: "typescript-kept" }) },
    { read: past, events: three.stream("A story past a silent address", STORY) },
  ];
  const whole = two.generate("A whole story", STORY);
  for (const { read, events } of streams) {
    while (read.tokens[0]!.length === 0) read.add((await events.next()).value as StreamEvent);
  }

  kill();

  const rest = streams.map(async ({ read, events }) => {
    for await (const event of events) read.add(event);
  });
  const outcomes = await Promise.allSettled(rest);
  assert.deepEqual(outcomes.map((outcome) => outcome.status), ["fulfilled", "fulfilled", "rejected", "fulfilled"]);
  assert.ok(outcomes[2]?.status === "rejected" && outcomes[2].reason instanceof Unavailable);

  // The id and the cursor are all that a program needs to read on, at any gateway.
  assert.ok(kept.tokens[0]!.length < STORY.maxTokens, "it was killed in the middle of an output");
  const other = new Client(second);
  for await (const event of other.resume(kept.id, kept.cursor)) if (event.case !== "accepted") kept.add(event);

  const calm = async (prompt: string, n = 1) => {
    const answer = await other.generate(prompt, { ...STORY, n });
    return [answer, ...answer.more];
  };
  for (const [read, answers] of [
    [single, await calm("A long story")],
    [several, await calm("Two stories", 2)],
    [kept, await calm("A kept story")],
    [past, await calm("A story past a silent address")],
  ] as const) {
    answers.forEach((answer, choice) => {
      assert.deepEqual(read.tokens[choice], answer.tokenIds);
      assert.equal(read.texts[choice], answer.text);
      assert.ok(read.shape.has(`end ${choice}`));
    });
  }
  assert.equal((await whole).text, (await calm("A whole story"))[0]!.text);
  other.close();
});
