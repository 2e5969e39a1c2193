// The request of a call: the prompt, the options, and the message made of them.

import { create, type DescMessage, type MessageInitShape } from "@bufbuild/protobuf";

import {
  ChatMessagesSchema,
  GenerateRequestSchema,
  OutputFormatSchema,
  SamplingParamsSchema,
  SpeculationSchema,
  Speculation_Drafter,
  Speculation_Mode,
  TokenIdsSchema,
  TokenizeRequestSchema,
  type ChatMessageSchema,
  type GenerateRequest,
  type OutputFormat,
  type Speculation,
  type TokenizeRequest,
} from "./gen/laps_sd/v1/inference_pb.js";

/** A message as a plain object: all fields optional. */
type Fields<Schema extends DescMessage> = Omit<Exclude<MessageInitShape<Schema>, { $typeName: string }>, "$typeName">;

/** A message of a chat: `{ role: "user", content: "…" }`. */
export type ChatMessageInit = Fields<typeof ChatMessageSchema>;

/** A text, token ids, or the messages of a chat. */
export type Prompt = string | readonly number[] | readonly ChatMessageInit[];

/** What the output must look like: one of the four. A schema may be an object or its JSON. */
export type Format =
  | { readonly jsonObject: true }
  | { readonly jsonSchema: string | object }
  | { readonly regex: string }
  | { readonly grammar: string };

type SamplingFields = Omit<Fields<typeof SamplingParamsSchema>, "seed" | "stop" | "badWords" | "badWordsIds">;
type ChatFields = Omit<Fields<typeof ChatMessagesSchema>, "messages">;
type RequestFields = Omit<
  Fields<typeof GenerateRequestSchema>,
  "prompt" | "sampling" | "speculation" | "outputFormat" | "deadlineUnixMs"
>;

/** All fields of a request except its prompt. `protos/laps_sd/v1/inference.proto` has the meaning and default of each. */
export interface Options extends SamplingFields, ChatFields, RequestFields {
  /** Same seed, same prompt, same settings: same text. */
  seed?: number | bigint;
  /** One text or several that end the output. */
  stop?: string | readonly string[];
  /** One text or several that the output may not contain. */
  badWords?: string | readonly string[];
  /** Token ids of words that the output may not contain. */
  badWordsIds?: readonly (readonly number[])[];
  /** Hard deadline by the gateway's clock, also while no client is connected. `timeoutMs` limits the call. */
  deadline?: Date;
  /** Changes the speed, never the text. A number is the longest draft in tokens. */
  speculation?: "auto" | "off" | number;
  /** Source of the draft tokens. */
  drafter?: "model" | "lookup";
  outputFormat?: Format;
}

const DRAFTERS = { model: Speculation_Drafter.MODEL, lookup: Speculation_Drafter.LOOKUP };

/** The schema to which an option belongs, by the option's name; those with a form of their own are missing. */
const SCHEMAS = new Map(
  [GenerateRequestSchema, ChatMessagesSchema, SamplingParamsSchema].flatMap((schema) =>
    schema.fields
      .filter((field) => !field.oneof && !["sampling", "messages", "speculation", "outputFormat"].includes(field.localName))
      .map((field) => [field.localName, schema] as const),
  ),
);

/** Returns the message for a prompt and its options. Absent options stay absent. Throws TypeError for an unknown option. */
export function makeRequest(prompt: Prompt, options: Options = {}): GenerateRequest {
  const { seed, stop, badWords, badWordsIds, deadline, speculation, drafter, outputFormat, ...plain } = options;
  const fields = sorted({
    ...plain,
    seed: seed === undefined ? undefined : BigInt(seed),
    stop: listOf(stop),
    badWords: listOf(badWords),
    badWordsIds: badWordsIds?.map((ids) => ({ ids: [...ids] })),
    deadlineUnixMs: deadline === undefined ? undefined : BigInt(deadline.getTime()),
  });
  const request = create(GenerateRequestSchema, fields.get(GenerateRequestSchema));
  request.prompt = promptOf(prompt, fields.get(ChatMessagesSchema));
  const sampling = fields.get(SamplingParamsSchema);
  if (sampling) request.sampling = create(SamplingParamsSchema, sampling);
  if (speculation !== undefined || drafter !== undefined) request.speculation = speculationOf(speculation, drafter);
  if (outputFormat) request.outputFormat = create(OutputFormatSchema, { format: formatOf(outputFormat) });
  return request;
}

/** Returns the message that asks for the token ids of a text or of chat messages. */
export function makeTokenizeRequest(prompt: string | readonly ChatMessageInit[]): TokenizeRequest {
  const made = promptOf(prompt);
  if (made.case === "tokenIds") throw new TypeError("the prompt has its token ids already");
  return create(TokenizeRequestSchema, { prompt: made });
}

/** Sorts options by the schema to which they belong. A schema without options is missing. */
function sorted(options: object): Map<DescMessage, Record<string, unknown>> {
  const found = new Map<DescMessage, Record<string, unknown>>();
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined) continue;
    const schema = SCHEMAS.get(name);
    if (schema === undefined) throw new TypeError(`unknown option ${name}`);
    if (!found.has(schema)) found.set(schema, {});
    Object.assign(found.get(schema) as object, { [name]: value });
  }
  return found;
}

/** A text by itself is one of the list, not a list of its characters. */
function listOf(texts: string | readonly string[] | undefined): string[] | undefined {
  return typeof texts === "string" ? [texts] : texts && [...texts];
}

function promptOf(prompt: Prompt, chat?: Record<string, unknown>): GenerateRequest["prompt"] {
  if (typeof prompt !== "string" && typeof prompt[0] !== "number") {
    const messages = [...prompt] as ChatMessageInit[];
    if (messages.some(({ content }) => typeof (content ?? "") !== "string")) {
      throw new TypeError("the content of a message must be a text"); // protobuf would make "[object Object]" of parts
    }
    return { case: "messages", value: create(ChatMessagesSchema, { ...chat, messages }) };
  }
  if (chat) throw new TypeError(`${Object.keys(chat).join(", ")}: only for a prompt of chat messages`);
  if (typeof prompt === "string") return { case: "text", value: prompt };
  return { case: "tokenIds", value: create(TokenIdsSchema, { ids: [...prompt] as number[] }) };
}

function speculationOf(speculation: Options["speculation"], drafter: Options["drafter"]): Speculation {
  return create(SpeculationSchema, {
    ...(speculation === "off" && { mode: Speculation_Mode.OFF }),
    ...(typeof speculation === "number" && { mode: Speculation_Mode.AUTO, maxDraftTokens: speculation }),
    ...(drafter && { drafter: DRAFTERS[drafter] }),
  });
}

function formatOf(format: Format): OutputFormat["format"] {
  if ("jsonObject" in format) return { case: "jsonObject", value: true };
  if ("regex" in format) return { case: "regex", value: format.regex };
  if ("grammar" in format) return { case: "grammar", value: format.grammar };
  const { jsonSchema } = format;
  return { case: "jsonSchema", value: typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema) };
}
