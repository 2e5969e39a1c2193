export { Client, type CallOptions, type ClientOptions } from "./client.js";
export {
  AlreadyExists,
  Cancelled,
  DeadlineExceeded,
  FailedPrecondition,
  InvalidArgument,
  LapsSdError,
  NotFound,
  PermissionDenied,
  ResourceExhausted,
  Unauthenticated,
  Unavailable,
  Unimplemented,
} from "./errors.js";
export type { Tls } from "./gateway.js";
export type { StreamEvent } from "./repair.js";
export { makeRequest, type ChatMessageInit, type Format, type Options, type Prompt } from "./request.js";
export * from "./gen/laps_sd/v1/inference_pb.js";
