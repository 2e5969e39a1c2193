// Streams one prompt to the terminal: node dist/examples/stream.js 127.0.0.1:50051 "Once upon a time"
// Kill the gateway meanwhile and start it again: the text goes on.

import { parseArgs } from "node:util";

import { Client, FinishReason, LapsSdError, type ClientOptions } from "laps-sd";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { "api-key": { type: "string" }, ca: { type: "string" }, "max-tokens": { type: "string", default: "100" } },
});
const [addresses = "127.0.0.1:50051", prompt = "Once upon a time"] = positionals;
const options: ClientOptions = {
  ...(values["api-key"] && { apiKey: values["api-key"] }),
  ...(values.ca && { tls: { ca: values.ca } }),
};

const client = new Client(addresses.split(","), options);
const control = new AbortController();
process.once("SIGINT", () => control.abort()); // Ctrl-C cancels the request

try {
  for await (const event of client.stream(prompt, { maxTokens: Number(values["max-tokens"]), signal: control.signal })) {
    switch (event.case) {
      case "delta":
        process.stdout.write(event.value.text);
        break;
      case "end": {
        const { finishReason, usage, speculation } = event.value;
        console.log(`\n-- ${FinishReason[finishReason]}, ${usage?.completionTokens} tokens, ${speculation?.accepted} of ${speculation?.drafted} draft tokens accepted`);
      }
    }
  }
} catch (error) {
  if (!control.signal.aborted && !(error instanceof LapsSdError)) throw error;
  console.error(error instanceof LapsSdError ? `${error.code}: ${error.message}` : "\n-- cancelled");
  process.exitCode = 1;
} finally {
  client.close();
}
