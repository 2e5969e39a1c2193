// The calls of gRPC to one gateway: as promises and asynchronous iterables, ended by an AbortSignal.

import { readFileSync } from "node:fs";

import { fromBinary, toBinary, type DescMessage, type DescMethodServerStreaming, type DescMethodUnary, type MessageShape } from "@bufbuild/protobuf";
import { Client, Metadata, connectivityState, credentials, status, type CallOptions, type ChannelCredentials } from "@grpc/grpc-js";

const MAX_MESSAGE_BYTES = 16 * 1024 * 1024;
/** Longest wait for a connection before a call, as of the Python client. */
const CONNECT_MS = 2_000;
/** Longest time limit that is one: over one that its header cannot hold, or that is no number, gRPC ends the process. */
const LONGEST_MS = 1e12;
const LOOPBACK = /^(localhost|127(\.\d+){3}|\[::1\]):\d+$/;

/** PEM files. `ca` verifies the gateway, without it Node's roots do; with `cert` and `key` this client identifies itself. */
export interface Tls {
  readonly ca?: string;
  readonly cert?: string;
  readonly key?: string;
  /** Name that the gateway's certificate must have, if it is not the host of the address. */
  readonly serverName?: string;
}

/** What holds for one call. A `timeoutMs` of Infinity: no deadline. */
export interface CallLimits {
  readonly timeoutMs: number;
  readonly signal: AbortSignal;
}

/** A channel to one gateway. Failed calls throw the ServiceError of gRPC, aborted ones the reason of their signal. */
export class Gateway {
  readonly #client: Client;
  readonly #metadata: Metadata;

  constructor(address: string, tls: Tls | undefined, metadata: Metadata) {
    this.#metadata = metadata;
    this.#client = new Client(address, channelCredentials(tls), {
      "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
      "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
      // Middleboxes keep an idle stream, and a dead gateway is noticed.
      "grpc.keepalive_time_ms": 20_000,
      "grpc.keepalive_timeout_ms": 10_000,
      "grpc.keepalive_permit_without_calls": 1,
      "grpc.initial_reconnect_backoff_ms": 100,
      "grpc.max_reconnect_backoff_ms": 2_000,
      "grpc.use_local_subchannel_pool": 1,
      // This machine itself is dialled directly, also if an environment variable names a proxy.
      ...(LOOPBACK.test(address) && { "grpc.enable_http_proxy": 0 }),
      ...(tls?.serverName && {
        "grpc.ssl_target_name_override": tls.serverName,
        "grpc.default_authority": tls.serverName,
      }),
    });
  }

  close(): void {
    this.#client.close();
  }

  /**
   * Waits until the channel has connected or failed to, or the signal is aborted. Fails as a lost call after CONNECT_MS: gRPC does
   * not limit an attempt, and what accepts connections may never answer. A call whose deadline passes first is left to gRPC.
   */
  async #connect({ deadline }: CallOptions, signal: AbortSignal): Promise<void> {
    const channel = this.#client.getChannel();
    const ends = Date.now() + CONNECT_MS;
    const until = Math.min(ends, deadline?.valueOf() ?? Infinity);
    while (!signal.aborted) {
      const state = channel.getConnectivityState(true);
      if (state !== connectivityState.IDLE && state !== connectivityState.CONNECTING) return;
      if (Date.now() >= ends) {
        const details = `no answer to the connection within ${CONNECT_MS / 1_000} s`;
        throw Object.assign(new Error(details), { code: status.UNAVAILABLE, details, metadata: new Metadata() });
      }
      if (Date.now() >= until) return;
      await new Promise<unknown>((resolve) => {
        signal.addEventListener("abort", resolve);
        channel.watchConnectivityState(state, until, () => {
          signal.removeEventListener("abort", resolve);
          resolve(undefined);
        });
      });
    }
  }

  /** Makes a unary call and returns its response. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    limits: CallLimits,
  ): Promise<MessageShape<O>> {
    const { signal } = limits;
    const options = callOptions(limits);
    await this.#connect(options, signal);
    signal.throwIfAborted();
    let cancel = () => {};
    try {
      return await new Promise<MessageShape<O>>((resolve, reject) => {
        const call = this.#client.makeUnaryRequest(
          ...wire(method),
          request,
          this.#metadata,
          options,
          (failed, response) => (failed ? reject(failed) : resolve(response as MessageShape<O>)),
        );
        cancel = () => call.cancel();
        signal.addEventListener("abort", cancel);
      });
    } catch (failed) {
      signal.throwIfAborted();
      throw failed;
    } finally {
      signal.removeEventListener("abort", cancel);
    }
  }

  /** Makes a call with a stream of responses and yields them. The call ends with the iteration. */
  async *stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    limits: CallLimits,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const { signal } = limits;
    const options = callOptions(limits);
    await this.#connect(options, signal);
    signal.throwIfAborted();
    const call = this.#client.makeServerStreamRequest(...wire(method), request, this.#metadata, options);
    const cancel = () => call.cancel();
    call.on("error", () => {}); // a call that was left fails with CANCELLED after its last reader
    signal.addEventListener("abort", cancel);
    try {
      for await (const message of call) {
        signal.throwIfAborted();
        yield message as MessageShape<O>;
      }
    } catch (failed) {
      signal.throwIfAborted();
      throw failed;
    } finally {
      signal.removeEventListener("abort", cancel);
      cancel();
    }
  }
}

/** Returns the path of a method, and how its messages become bytes and back. */
function wire<I extends DescMessage, O extends DescMessage>(
  method: DescMethodUnary<I, O> | DescMethodServerStreaming<I, O>,
): [string, (message: MessageShape<I>) => Buffer, (bytes: Buffer) => MessageShape<O>] {
  return [
    `/${method.parent.typeName}/${method.name}`,
    (message) => Buffer.from(toBinary(method.input, message)),
    (bytes) => fromBinary(method.output, bytes),
  ];
}

function callOptions({ timeoutMs }: CallLimits): CallOptions {
  return timeoutMs <= LONGEST_MS ? { deadline: new Date(Date.now() + timeoutMs) } : {};
}

function channelCredentials(tls: Tls | undefined): ChannelCredentials {
  if (tls === undefined) return credentials.createInsecure();
  const read = (path: string | undefined) => (path === undefined ? null : readFileSync(path));
  return credentials.createSsl(read(tls.ca), read(tls.key), read(tls.cert));
}
