"""A long prompt is computed in rounds that requests share which decode: gateway, scheduler, record and worker, each a process."""

from __future__ import annotations

import threading

from laps_sd.cli.operate import explanation_lines
from laps_sd.client import Client
from tests.conftest import StackMaker


def test_the_timeline_of_a_long_prompt_has_what_its_prefill_took(
    make_stack: StackMaker,
) -> None:
    stack = make_stack(slots=4, environment={"LAPS_SD_MAX_ROUND_S": "0", "LAPS_SD_FAKE_ROUND_S": "0.005"})
    with Client(stack.gateway_address) as client:
        decodes = threading.Event()

        def decode() -> None:
            for _ in client.stream("Once upon a time", seed=1, max_tokens=900, ignore_eos=True):
                decodes.set()

        thread = threading.Thread(target=decode)
        thread.start()
        assert decodes.wait(timeout=60)
        long = client.generate(
            "The harbour master wrote every ship and its cargo into the book. " * 70, max_tokens=2
        )
        thread.join()
        explanation = client.explain(long.accepted.request_id)
    (line,) = [line.detail for line in explanation.story if line.what == "prefilled"]
    tokens = long.end.usage.prompt_tokens
    assert line.startswith(f"{tokens} tokens in ")
    assert line.endswith(" s, shared with 1 request")
    assert any(line in shown for shown in explanation_lines(explanation))
