// TLS in both directions, and an API key: LAPS_SD_TEST_TLS has the folder of ca.pem, cert.pem and key.pem.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Client, Unauthenticated, Unavailable, type ClientOptions } from "laps-sd";

const address = process.env["LAPS_SD_TEST_GATEWAYS"] as string;
const folder = process.env["LAPS_SD_TEST_TLS"] as string;
const apiKey = process.env["LAPS_SD_TEST_KEY"] as string;
const tls = { ca: `${folder}/ca.pem`, cert: `${folder}/cert.pem`, key: `${folder}/key.pem` };

async function tokens(options: ClientOptions): Promise<number> {
  const client = new Client(address, { retryMs: 50, ...options });
  try {
    return (await client.generate("Once", { maxTokens: 3, ignoreEos: true })).tokenIds.length;
  } finally {
    client.close();
  }
}

test("a client with a certificate and a key is served", async () => {
  assert.equal(await tokens({ tls, apiKey }), 3);
});

test("a client without a known key is refused", async () => {
  await assert.rejects(tokens({ tls }), Unauthenticated);
  await assert.rejects(tokens({ tls, apiKey: "laps-wrong" }), Unauthenticated);
});

test("a client does not talk to a gateway whose certificate has another name or another CA", async () => {
  await assert.rejects(tokens({ tls: { ...tls, serverName: "other.test" }, apiKey }), Unavailable);
  await assert.rejects(tokens({ tls: { cert: tls.cert, key: tls.key }, apiKey }), Unavailable);
});

test("nor does a gateway to a client without a certificate", async () => {
  await assert.rejects(tokens({ tls: { ca: tls.ca }, apiKey }), Unavailable);
});
