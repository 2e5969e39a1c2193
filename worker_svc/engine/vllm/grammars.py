"""Output formats by vLLM's structured outputs: compiled within the bounds of the torch engine's formats.

Formats come from clients, and llguidance trusts them (`laps_sd.contract.formats`), as vLLM's own backend does.
The backend here is vLLM's with another compiler: that of `sampling.formats`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from laps_sd.contract import formats
from worker_svc.engine.interface import FormatKind, OutputFormat
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.sampling.formats import matcher_of

__all__ = ["bound_formats", "follow_grammar", "format_problem", "structured_outputs", "wait_for_a_grammar"]

OTHER_WAIT_S = 0.001
_KINDS = {
    StructuredOutputOptions.JSON: FormatKind.JSON_SCHEMA,
    StructuredOutputOptions.JSON_OBJECT: FormatKind.JSON_OBJECT,
    StructuredOutputOptions.REGEX: FormatKind.REGEX,
    StructuredOutputOptions.GRAMMAR: FormatKind.GRAMMAR,
}
_FIELDS = {FormatKind.JSON_SCHEMA: "json", FormatKind.REGEX: "regex", FormatKind.GRAMMAR: "grammar"}


def structured_outputs(wanted: OutputFormat | None) -> StructuredOutputsParams | None:
    """Return vLLM's parameters of a format. Raises ValueError for a schema that is not JSON."""
    if wanted is None:
        return None
    if wanted.kind is FormatKind.JSON_OBJECT:
        params = StructuredOutputsParams(json_object=True)
    else:
        if wanted.kind is FormatKind.JSON_SCHEMA:
            try:
                json.loads(wanted.text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"format is not valid JSON: {error}") from None
        params = StructuredOutputsParams(**{_FIELDS[wanted.kind]: wanted.text})
    params._backend = "guidance"  # vLLM's front end sets this, and is not used here
    return params


class FollowedGrammar(GuidanceGrammar):
    """vLLM's grammar of one request, which continues after a draft token that it cannot follow.

    A step that would cost too much makes the library's matcher fail for good, and vLLM then allows the end
    only. It may follow a draft token that is rejected, so the format is compiled again, and follows the other
    tokens again.
    """

    ll_matcher: Any

    def __init__(self, compile_again: Callable[[], Any], ll_tokenizer: Any, vocab_size: int) -> None:
        """`compile_again` returns a matcher that has read nothing."""
        super().__init__(compile_again(), ll_tokenizer, vocab_size)
        self.problem = ""
        """Why the last step failed, until a token is accepted after it."""
        self._compile_again = compile_again
        # Tokens that were accepted: committed ones, then draft tokens.
        self._tokens: list[int] = []
        # A matcher that has read this number of committed tokens, and no draft token. It fails with its
        # copies.
        self._committed, self._followed = self.ll_matcher.deep_copy(), 0
        # Those after which it could not compute what may come next; None: it never failed so, or other tokens came.
        self._failed_after: list[int] | None = None

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Take in draft tokens, or committed ones. Returns False if the format does not allow them."""
        if self.ll_matcher.is_error():
            self._restart(list(self._tokens))
        if self._failed_after is not None:
            after = self._tokens + tokens
            if (
                len(after) > len(self._failed_after)
                and after[: len(self._failed_after)] == self._failed_after
            ):
                return False
        accepted = bool(super().accept_tokens(request_id, tokens))
        if accepted:
            self.problem, self._failed_after = "", None
            self._tokens.extend(tokens)
        elif self.ll_matcher.is_error():
            self._restart(None)
        return accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the leading tokens that the format allows one after another."""
        valid: list[int] = super().validate_tokens(tokens)
        if self.ll_matcher.is_error():
            self._restart(None)
            self.problem = ""
        return valid

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens, which are all draft tokens, and a failure after them.

        The library's own rollback may leave a matcher that allows fewer tokens (1.7 to 1.9).
        """
        before = list(self._tokens) if self.ll_matcher.is_error() else None
        del self._tokens[max(0, len(self._tokens) - num_tokens) :]
        if before is not None:
            self._restart(before)
            return
        self._committed.try_consume_tokens(self._tokens[self._followed :])
        self._followed = len(self._tokens)
        if self._committed.is_error():
            self._restart(None)
            return
        self.ll_matcher = self._committed.deep_copy()
        self.terminated, self.rollback_lag = False, 0

    def _restart(self, failed_after: list[int] | None) -> None:
        self.problem, self._failed_after = self.ll_matcher.get_error(), failed_after
        self.ll_matcher = self._compile_again()
        self._committed, self._followed = self.ll_matcher.deep_copy(), 0
        self.terminated, self.rollback_lag = False, 0
        self.ll_matcher.try_consume_tokens(self._tokens)


class BoundedGuidance(GuidanceBackend):
    """vLLM's backend over llguidance, with the compiler of the torch engine."""

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> GuidanceGrammar:
        """Return the grammar of a format. Raises ValueError in one sentence for an impossible one."""
        wanted = OutputFormat(_KINDS[request_type], grammar_spec)
        compiled = functools.partial(matcher_of, wanted, self.ll_tokenizer)
        return FollowedGrammar(compiled, self.ll_tokenizer, self.vocab_size)


def bound_formats(core: Any) -> None:
    """Make a core of vLLM compile output formats with `BoundedGuidance`, if it has a tokenizer."""
    config = core.vllm_config
    manager = core.structured_output_manager
    if not config.model_config.skip_tokenizer_init:
        manager.backend = BoundedGuidance(
            config, tokenizer=manager.tokenizer, vocab_size=config.model_config.get_vocab_size()
        )


def follow_grammar(request: Request, committed: Sequence[int]) -> None:
    """Make the grammar of a new request begin after tokens of its output that exist already.

    vLLM compiles grammars in threads and reads a future in `schedule`. The one that it reads from now on is
    done after the tokens were taken in, so that no step sees the grammar before.
    """
    structured = request.structured_output_request
    if structured is None or not committed:
        return
    compiled = structured._grammar
    ready: Future[Any] = Future()

    def follow(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            if not grammar.accept_tokens(request.request_id, list(committed)):
                raise ValueError("format does not allow the output so far")
            ready.set_result(grammar)
        except Exception as error:
            ready.set_exception(error)

    structured.grammar = ready
    if isinstance(compiled, Future):
        compiled.add_done_callback(follow)
    else:  # compiled at once
        done: Future[Any] = Future()
        done.set_result(compiled)
        follow(done)


def wait_for_a_grammar(requests: Iterable[Request], seconds: float) -> None:
    """Return when one of the grammars that still compile is ready, or after `seconds`.

    If none does, vLLM waits for something else, such as KV of a connector: return after `OTHER_WAIT_S`.
    """
    futures = [
        request.structured_output_request._grammar
        for request in requests
        if request.structured_output_request is not None
        and isinstance(request.structured_output_request._grammar, Future)
    ]
    if futures:
        wait(futures, seconds, return_when=FIRST_COMPLETED)
    else:
        time.sleep(OTHER_WAIT_S)


def format_problem(request: Request) -> str:
    """Return why the output format of a request cannot be used or cannot continue; empty if it can."""
    structured = request.structured_output_request
    grammar = None if structured is None else structured.grammar
    if grammar is None:
        return ""
    if isinstance(grammar, Exception):
        return first_line(grammar)
    reason = getattr(grammar, "problem", "") or grammar.ll_matcher.get_error()
    return f"the output format cannot continue: {formats.first_line(reason)}" if reason else ""
