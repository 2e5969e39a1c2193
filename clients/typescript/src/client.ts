// The client: repeats calls, resumes streams, and cancels what nobody reads.

import { setMaxListeners } from "node:events";

import { create } from "@bufbuild/protobuf";
import type { DescMessage, DescMethodUnary, MessageShape } from "@bufbuild/protobuf";
import { Metadata, type ServiceError } from "@grpc/grpc-js";

import { Cancelled, LapsSdError, isFailedCall, isLost } from "./errors.js";
import {
  CancelRequestSchema,
  DetokenizeRequestSchema,
  ExplainRequestSchema,
  Inference,
  ListModelsRequestSchema,
  ResumeRequestSchema,
  type Cursor,
  type Explanation,
  type GenerateEvent,
  type GenerateRequest,
  type GenerateResponse,
  type Model,
  type ResumeRequest,
} from "./gen/laps_sd/v1/inference_pb.js";
import { Gateway, type CallLimits, type Tls } from "./gateway.js";
import { Patience, Progress, collect, type StreamEvent } from "./repair.js";
import { makeRequest, makeTokenizeRequest, type ChatMessageInit, type Options, type Prompt } from "./request.js";

/** Time limit of the cancel call of a client that leaves its stream early. */
const LEAVING_MS = 2_000;
/** A longer one fires at once. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Settings of a client. */
export interface ClientOptions {
  readonly apiKey?: string;
  readonly tls?: Tls;
  /** Further metadata of every call. */
  readonly metadata?: Readonly<Record<string, string>>;
  /** Longest time to repair the lost connection of a stream. Default 30 000. */
  readonly reconnectMs?: number;
  /** Longest time to repeat a call that has had no effect yet. Default 5 000. */
  readonly retryMs?: number;
}

/** What may limit a call. */
export interface CallOptions {
  /** Hard deadline of the call: then it throws DeadlineExceeded, and the work stops. `timeLimitMs` is the soft one. */
  readonly timeoutMs?: number;
  /** Aborting it ends the call, cancels its requests, and throws the signal's reason. */
  readonly signal?: AbortSignal;
}

/** A client of one or several gateways of a system. Close it when its calls are done. */
export class Client {
  readonly #gateways: Gateway[];
  readonly #reconnectMs: number;
  readonly #retryMs: number;
  readonly #closing = new AbortController();
  /** The cancel calls of streams that were left. */
  readonly #leaving = new Set<Promise<void>>();
  #at = 0;

  /** @param address host:port, or several: when no server answers at one, the client goes on at the next. */
  constructor(address: string | readonly string[] = "127.0.0.1:50051", options: ClientOptions = {}) {
    const addresses = typeof address === "string" ? [address] : address;
    if (addresses.length === 0) throw new TypeError("a client needs the address of a gateway");
    for (const one of addresses) {
      const [, scheme, rest] = /^(grpcs?|https?):\/\/(.*)$/i.exec(one) ?? [];
      if (scheme === undefined) continue; // gRPC would look for a host of that name
      const secure = scheme.toLowerCase().endsWith("s") ? " with tls: {}" : "";
      throw new TypeError(`the address of a gateway is host:port, such as ${rest}${secure}, got '${one}'`);
    }
    if (/[^\x20-\x7e]/.test(options.apiKey ?? "")) {
      // Not by gRPC, whose error has the key in it.
      throw new TypeError("an API key has printable ASCII characters only; this one has others, such as a line break at its end");
    }
    const metadata = new Metadata();
    for (const [name, value] of Object.entries(options.metadata ?? {})) metadata.add(name, value);
    if (options.apiKey) metadata.set("authorization", `Bearer ${options.apiKey}`);
    this.#gateways = addresses.map((one) => new Gateway(one, options.tls, metadata));
    this.#reconnectMs = options.reconnectMs ?? 30_000;
    this.#retryMs = options.retryMs ?? 5_000;
  }

  /** Ends all calls, cancels the requests of open streams, and then closes the connections. */
  close(): void {
    this.#closing.abort(new Cancelled("the client was closed", "CANCELLED"));
    void Promise.allSettled(this.#leaving).then(() => this.#gateways.forEach((gateway) => gateway.close()));
  }

  /** Returns the whole answer. */
  async generate(prompt: Prompt, options: Options & CallOptions = {}): Promise<GenerateResponse> {
    const events: StreamEvent[] = [];
    for await (const event of this.stream(prompt, options)) events.push(event);
    return collect(events);
  }

  /**
   * Sends a prompt and yields its events as they arrive: of each output `accepted`, then `delta`s, `end` last. Leaving the loop
   * early cancels the request, unless it has an `idempotencyKey` or `keep`.
   */
  stream(prompt: Prompt, options: Options & CallOptions = {}): AsyncGenerator<StreamEvent, void, undefined> {
    const { timeoutMs, signal, ...fields } = options;
    return this.send(makeRequest(prompt, fields), { ...(timeoutMs !== undefined && { timeoutMs }), ...(signal && { signal }) });
  }

  /** Sends a ready request, which stays as it is, and yields its events. It is sent with an idempotency key if it has none. */
  send(request: GenerateRequest, options: CallOptions = {}): AsyncGenerator<StreamEvent, void, undefined> {
    return this.#events(request, options);
  }

  /** Attaches to an existing request and yields its events from the cursor on, without one from the start. */
  resume(requestId: string, cursor?: Cursor, options: CallOptions = {}): AsyncGenerator<StreamEvent, void, undefined> {
    return this.#events(create(ResumeRequestSchema, { requestId, ...(cursor && { cursor }) }), options);
  }

  /** Ends a request; returns false if it had already ended. */
  async cancel(requestId: string, options: CallOptions = {}): Promise<boolean> {
    return (await this.#call(Inference.method.cancel, create(CancelRequestSchema, { requestId }), options)).cancelled;
  }

  /** Returns why a request is where it is. */
  async explain(requestId: string, options: CallOptions = {}): Promise<Explanation> {
    const response = await this.#call(Inference.method.explain, create(ExplainRequestSchema, { requestId }), options);
    if (response.explanation === undefined) throw new LapsSdError("the server sent no explanation");
    return response.explanation;
  }

  /** Returns the models that the gateway serves. */
  async models(options: CallOptions = {}): Promise<Model[]> {
    return (await this.#call(Inference.method.listModels, create(ListModelsRequestSchema), options)).models;
  }

  /** Returns the token ids of a text or of chat messages. */
  async tokenize(prompt: string | readonly ChatMessageInit[], options: CallOptions = {}): Promise<number[]> {
    return (await this.#call(Inference.method.tokenize, makeTokenizeRequest(prompt), options)).tokenIds;
  }

  /** Returns the text of output tokens. */
  async detokenize(tokenIds: readonly number[], options: CallOptions = {}): Promise<string> {
    const request = create(DetokenizeRequestSchema, { tokenIds: [...tokenIds] });
    return (await this.#call(Inference.method.detokenize, request, options)).text;
  }

  get #gateway(): Gateway {
    return this.#gateways[this.#at % this.#gateways.length] as Gateway;
  }

  /**
   * Returns a signal that ends with the caller's and with the client, and what unlinks it. AbortSignal.any would keep a part of each
   * call for as long as one of the two lives.
   */
  #link(signal: AbortSignal | undefined): { signal: AbortSignal; unlink: () => void } {
    const sources = signal ? [signal, this.#closing.signal] : [this.#closing.signal];
    const either = new AbortController();
    const abort = () => either.abort(sources.find((source) => source.aborted)?.reason);
    for (const source of sources) {
      setMaxListeners(0, source); // each call in progress listens; Node warns of more than 10
      source.addEventListener("abort", abort);
    }
    if (sources.some((source) => source.aborted)) abort();
    return { signal: either.signal, unlink: () => sources.forEach((source) => source.removeEventListener("abort", abort)) };
  }

  /** Makes a call that may be repeated, and returns its response. */
  async #call<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    const { signal, unlink } = this.#link(options.signal);
    const patience = new Patience(this.#retryMs, options.timeoutMs, performance.now());
    try {
      for (;;) {
        const at = this.#at;
        try {
          return await this.#gateway.unary(method, request, { timeoutMs: patience.timeoutMs(performance.now()), signal });
        } catch (failed) {
          if (!isFailedCall(failed)) throw failed;
          if (isLost(failed)) this.#leave(at);
          await pause(patience.pauseMs(failed, performance.now()), signal);
        }
      }
    } finally {
      unlink();
    }
  }

  /** Goes on at the next address, once for all calls that failed together at this one. */
  #leave(at: number): void {
    if (this.#at === at) this.#at += 1;
  }

  async *#events(
    request: GenerateRequest | ResumeRequest,
    options: CallOptions,
  ): AsyncGenerator<StreamEvent, void, undefined> {
    const { signal, unlink } = this.#link(options.signal);
    const limits = { timeoutMs: options.timeoutMs, reconnectMs: this.#reconnectMs, retryMs: this.#retryMs };
    const progress = new Progress(request, limits, performance.now());
    let left: Promise<void> | undefined;
    const leave = () => (left ??= this.#cancel(progress.toCancel));
    signal.addEventListener("abort", leave); // its caller may never want the next event
    try {
      while (!progress.ended) {
        const at = this.#at;
        let failed: ServiceError | undefined;
        try {
          for await (const message of this.#open(progress, signal)) {
            const event = progress.take(message, performance.now());
            if (event) yield event;
          }
        } catch (error) {
          if (!isFailedCall(error)) throw error;
          failed = error;
        }
        if (progress.ended) break;
        if (isLost(failed)) this.#leave(at);
        await pause(progress.lost(failed, performance.now()), signal);
      }
    } finally {
      unlink();
      await leave();
    }
  }

  #open(progress: Progress, signal: AbortSignal): AsyncGenerator<GenerateEvent, void, undefined> {
    const request = progress.request();
    const limits: CallLimits = { timeoutMs: progress.timeoutMs(performance.now()), signal };
    return request.$typeName === "laps_sd.v1.ResumeRequest"
      ? this.#gateway.stream(Inference.method.resume, request, limits)
      : this.#gateway.stream(Inference.method.generateStream, request, limits);
  }

  /** Cancels requests that their caller has left, also while the client is closed; that it fails is no error of the caller. */
  async #cancel(requestIds: readonly string[]): Promise<void> {
    const limits: CallLimits = { timeoutMs: LEAVING_MS, signal: new AbortController().signal };
    const cancel = async (requestId: string) => {
      const request = create(CancelRequestSchema, { requestId });
      await this.#gateway.unary(Inference.method.cancel, request, limits).catch((failed: unknown) => {
        if (!isFailedCall(failed)) throw failed;
      });
    };
    const all = Promise.all(requestIds.map(cancel)).then(() => {});
    this.#leaving.add(all);
    await all.finally(() => this.#leaving.delete(all));
  }
}

/** Waits. Throws the signal's reason when it is aborted. */
async function pause(ms: number, signal: AbortSignal): Promise<void> {
  signal.throwIfAborted();
  await new Promise<void>((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, Math.min(ms, LONGEST_TIMER_MS));
    signal.addEventListener("abort", end);
  });
  signal.throwIfAborted();
}
