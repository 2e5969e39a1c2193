"""A response: its items as they grow, as server-sent events or whole."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.api.openai.answer import AnswerReader
from gateway.api.openai.body import Json
from gateway.api.openai.errors import error_json
from gateway.api.openai.growing import GrowingReply
from gateway.api.openai.reply import COMPACT
from gateway.api.openai.request import ParsedRequest
from gateway.api.openai.responses.tools import ToolsOfResponse
from gateway.calls.generation import Generation
from gateway.model.files import ModelFiles
from laps_sd.errors import LapsSdError

__all__ = ["ResponsesReply"]


class ResponsesReply(GrowingReply):
    """One response; see `StreamedReply`."""

    TEXT, REASONING, CALL = "message", "reasoning", "function_call"

    def __init__(
        self,
        parsed: ParsedRequest,
        tools: ToolsOfResponse,
        repeated: Json,
        generation: Generation,
        *,
        created_unix_s: int,
        model: ModelFiles,
    ) -> None:
        """`repeated`: fields of the body that the answer has too."""
        super().__init__(AnswerReader(parsed, generation, model))
        self._created = created_unix_s
        self._tools = tools
        self._repeated = repeated
        self._number = 0

    # ---- as StreamedReply

    def opening(self) -> bytes:
        """Return the events before any output has arrived."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def closing(self) -> bytes:
        """Return the events of the end."""
        status = self._status()
        events = b"".join(self._close(status))
        return events + self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: LapsSdError) -> bytes:
        """Return the event of a failure."""
        fields = error_json(error)["error"]
        return self._event("error", code=fields["code"], message=fields["message"], param=fields["param"])

    # ---- items

    def _begun(self, block: Json) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._blocks) - 1, item=block)

    def _call(self, call_id: str, name: str) -> Json:
        return {
            "id": f"fc_{self.id}_{len(self._blocks)}",
            "type": "function_call",
            "call_id": call_id,
            **self._tools.item_of(name),
            "arguments": "",
            "status": "in_progress",
        }

    def _add_arguments(self, text: str) -> bytes:
        assert self._open is not None, "a call grows"
        self._open["arguments"] += text
        return self._item_event("response.function_call_arguments.delta", delta=text)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._grows(kind):
            yield from self._close()
            item: Json = {"id": f"{'msg' if kind == 'message' else 'rs'}_{self.id}_{len(self._blocks)}"}
            item |= {"type": kind, "status": "in_progress", "content": []}
            if kind == "message":
                yield from self._begin(item | {"role": "assistant"})
            else:
                yield from self._begin(item | {"summary": []})
            assert self._open is not None, "it was begun"
            part = _part(kind, "")
            self._open["content"].append(part)
            yield self._item_event("response.content_part.added", content_index=0, part=part.copy())
        assert self._open is not None, "it was begun"
        self._open["content"][0]["text"] += text
        yield self._text_event("delta", delta=text)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        item = self._open
        if item is None:
            return
        if item["type"] == self.CALL:
            status = "incomplete" if self._is_broken(item) else "completed"
        item["status"] = status
        if item["type"] != self.CALL:
            (part,) = item["content"]
            yield self._text_event("done", text=part["text"])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        elif status == "completed":
            yield self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        yield self._event("response.output_item.done", output_index=len(self._blocks) - 1, item=item)
        self._open = None

    # ---- events

    def _text_event(self, what: str, **fields: object) -> bytes:
        assert self._open is not None, "an item grows"
        if self._open["type"] == "reasoning":
            return self._item_event(f"response.reasoning_text.{what}", content_index=0, **fields)
        return self._item_event(f"response.output_text.{what}", content_index=0, **fields, logprobs=[])

    def _item_event(self, kind: str, **fields: object) -> bytes:
        assert self._open is not None, "an item grows"
        return self._event(kind, item_id=self._open["id"], output_index=len(self._blocks) - 1, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {COMPACT.encode(event)}\n\n".encode()

    # ---- the response

    def _whole(self) -> Json:
        status = self._status()
        if self._blocks and self._blocks[-1]["type"] != self.CALL:
            self._blocks[-1]["status"] = status
        return self._response(status)

    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._answer.model,
            "output": [block for block in self._blocks if not self._is_broken(block)],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._repeated,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _is_broken(self, block: Json) -> bool:
        """Return whether a block is a call that broke after it was announced; its text follows."""
        return block["type"] == self.CALL and not self._answer.has_call(block["call_id"])

    def _usage(self) -> Json:
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
        }


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
