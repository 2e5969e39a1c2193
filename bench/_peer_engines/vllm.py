"""vLLM, one scheduler step at a time, without its second process."""

from __future__ import annotations

from typing import Any

from bench._peer_engines.engine import Progress


class Vllm:
    def __init__(self, setup: dict[str, Any]) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.version = vllm.__version__
        speculative = None
        if setup["draft_len"]:
            speculative = {
                "method": "draft_model",
                "model": setup["draft"],
                "num_speculative_tokens": setup["draft_len"],
            }
        self._engine = vllm.LLM(
            model=setup["target"],
            dtype=setup["dtype"],
            max_model_len=setup["max_length"],
            max_num_seqs=setup["slots"],
            enforce_eager=not setup["compiled"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=speculative,
        ).llm_engine
        self._ends = setup["ends"]
        self._sampling = vllm.SamplingParams
        self._kind = RequestOutputKind.DELTA

    def add(self, number: int, ids: list[int], tokens: int) -> None:
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=not self._ends,
            stop_token_ids=self._ends,
            detokenize=False,
            output_kind=self._kind,
        )
        self._engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)

    def step(self) -> list[Progress]:
        # A request id may come back with a suffix.
        return [
            Progress(int(one.request_id.split("-")[0]), list(one.outputs[0].token_ids), bool(one.finished))
            for one in self._engine.step()
        ]
