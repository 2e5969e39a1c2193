// A streamed generation by the public HTTP API, read as tokens and rounds.
//
// One event of the stream has the tokens of one round: accepted draft tokens, and last the token that the target added
// itself (the bonus token). Events of several rounds are merged where a reader or the scheduler was slow; the last
// event's count of accepted tokens shows whether that happened.

import { CallError, call, events } from "./api";

export interface Token {
  text: string;
  origin: "accepted" | "bonus" | "unknown";
}

export interface Summary {
  finish: string;
  promptTokens: number;
  outputTokens: number;
  drafted: number;
  accepted: number;
  firstTokenS?: number;
  totalS?: number;
  preemptions?: number;
  /** False: rounds were merged on the way, so that some colours are wrong. */
  exact: boolean;
}

export interface Options {
  kind: "chat" | "text";
  model: string;
  prompt: string;
  maxTokens: number;
  temperature: number;
}

interface Logprob {
  token: string;
  bytes?: number[] | null;
}

interface Chunk {
  id: string;
  choices: {
    delta?: { content?: string | null; reasoning_content?: string | null };
    text?: string;
    logprobs?: { content?: Logprob[]; tokens?: string[] } | null;
    finish_reason?: string | null;
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  metrics?: {
    speculative_decoding?: { num_draft_tokens: number; num_accepted_draft_tokens: number };
    timing?: { first_token_s: number; total_s: number; preemptions: number };
  };
  error?: { message: string };
}

/** Generates; calls `onTokens` with all tokens so far. Returns the summary. Throws CallError. */
export async function generate(
  options: Options,
  signal: AbortSignal,
  onId: (id: string) => void,
  onTokens: (tokens: readonly Token[]) => void,
): Promise<Summary> {
  const response = await post(options, signal);
  const tokens: Token[] = [];
  const decoder = new TextDecoder();
  let finish = "";
  let last: Chunk | undefined;
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new CallError(chunk.error.message, 500);
    onId(chunk.id);
    if (chunk.usage) last = chunk;
    for (const choice of chunk.choices) {
      finish = choice.finish_reason ?? finish;
      tokens.push(...tokensOf(choice, decoder));
    }
    onTokens(tokens);
  }
  return summaryOf(tokens, finish, last, onTokens);
}

async function post(options: Options, signal: AbortSignal): Promise<Response> {
  try {
    return await send(options, signal, true);
  } catch (error) {
    // A gateway may refuse log probabilities, which have the texts of single tokens: then without colours.
    if (error instanceof CallError && error.status === 400 && /logprobs|log prob/i.test(error.message)) return send(options, signal, false);
    throw error;
  }
}

function send({ kind, model, prompt, maxTokens, temperature }: Options, signal: AbortSignal, tokens: boolean): Promise<Response> {
  const common = { model, max_tokens: maxTokens, temperature, stream: true, stream_options: { include_usage: true } };
  const body =
    kind === "chat"
      ? { ...common, messages: [{ role: "user", content: prompt }], ...(tokens && { logprobs: true }) }
      : { ...common, prompt, ...(tokens && { logprobs: 0 }) };
  const path = kind === "chat" ? "/v1/chat/completions" : "/v1/completions";
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

function tokensOf(choice: Chunk["choices"][number], decoder: TextDecoder): Token[] {
  const { logprobs } = choice;
  const texts = logprobs?.content?.map((one) => textOf(one, decoder)) ?? logprobs?.tokens ?? [];
  if (texts.length) return texts.map((text, place) => ({ text, origin: place === texts.length - 1 ? "bonus" : "accepted" }));
  if (logprobs) return []; // text that was held back: its tokens came before
  const text = choice.delta?.content ?? choice.delta?.reasoning_content ?? choice.text ?? "";
  return text ? [{ text, origin: "unknown" }] : [];
}

/** The text of a token; a character of several tokens appears with the last of them. */
function textOf(one: Logprob, decoder: TextDecoder): string {
  return one.bytes ? decoder.decode(new Uint8Array(one.bytes), { stream: true }) : one.token;
}

function summaryOf(tokens: Token[], finish: string, last: Chunk | undefined, onTokens: (tokens: readonly Token[]) => void): Summary {
  const counts = last?.metrics?.speculative_decoding;
  const accepted = counts?.num_accepted_draft_tokens ?? 0;
  const shown = tokens.filter((token) => token.origin === "accepted").length;
  const end = tokens.at(-1);
  if (end?.origin === "bonus" && accepted === shown + 1) {
    end.origin = "accepted"; // the output ended with a draft token
    onTokens(tokens);
  }
  return {
    finish,
    promptTokens: last?.usage?.prompt_tokens ?? 0,
    outputTokens: last?.usage?.completion_tokens ?? 0,
    drafted: counts?.num_draft_tokens ?? 0,
    accepted,
    firstTokenS: last?.metrics?.timing?.first_token_s,
    totalS: last?.metrics?.timing?.total_s,
    preemptions: last?.metrics?.timing?.preemptions,
    exact: accepted === shown || accepted === shown + 1,
  };
}
