"""Submit a prompt, get a text."""

from __future__ import annotations

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb


def test_a_prompt_goes_in_and_a_text_comes_out(fake_stack: LocalStack) -> None:
    """`generate` waits for the whole answer: the text, its token ids, and how it ended."""
    with Client(fake_stack.gateway_address) as client:
        answer = client.generate("Once upon a time", max_tokens=20)

    assert answer.text
    assert len(answer.token_ids) == 20
    assert answer.end.finish_reason == pb.FINISH_REASON_LENGTH


def test_a_prompt_may_be_a_conversation(fake_stack: LocalStack) -> None:
    """Chat messages are rendered by the model's own template, so they are more tokens than their words."""
    question = "What is the capital of France?"
    with Client(fake_stack.gateway_address) as client:
        plain = client.generate(question, max_tokens=1)
        chat = client.generate([{"role": "user", "content": question}], max_tokens=1)

    assert chat.accepted.prompt_tokens > plain.accepted.prompt_tokens


def test_the_answer_accounts_for_what_speculation_did(fake_stack: LocalStack) -> None:
    """Each round the draft model proposes tokens, the target keeps a part of them and adds one of its own."""
    with Client(fake_stack.gateway_address) as client:
        end = client.generate("Once upon a time", max_tokens=20).end

    assert 0 <= end.speculation.accepted <= end.speculation.drafted
    assert end.speculation.accepted + end.speculation.rounds >= end.usage.completion_tokens == 20
    assert 0 <= end.timing.first_token_s <= end.timing.total_s
