"""The shipped pair agrees with its card: small, plain Hugging Face files, right on easy prompts, worth
drafting with.
"""

import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from demo._tasks.tools import ToolChat, tool_chat
from demo.corpus import tool_prompt
from demo.evaluate import Round, intraclass_correlation, rounds_of, sample, summarise, text_of
from demo.model_card import tool_prompts
from demo.prompts import KINDS, Prompt, demo_prompts
from demo.tasks import GENERATORS
from worker_svc.demo import DRAFT_DIR, TARGET_DIR


@dataclass(frozen=True)
class Pair:
    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(
        AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32).eval(),
        AutoModelForCausalLM.from_pretrained(DRAFT_DIR, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(TARGET_DIR),
    )


def greedy(demo: Pair, text: str, *, chat: bool = False) -> str:
    (written,) = sample(
        demo.target,
        demo.draft,
        demo.tokenizer,
        [Prompt("", text)],
        temperature=0,
        max_new_tokens=64,
        chat=chat,
    )
    assert written.ended, f"no end token after {text!r}"
    return text_of(demo.tokenizer, written.output_ids).strip()


def test_the_files_are_small_and_share_one_tokenizer() -> None:
    files = [file for folder in (TARGET_DIR, DRAFT_DIR) for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 12e6
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TARGET_DIR / name).read_bytes() == (DRAFT_DIR / name).read_bytes()


def test_both_models_speak_the_tokenizers_vocabulary(demo: Pair) -> None:
    for model in (demo.target, demo.draft):
        assert model.config.vocab_size == len(demo.tokenizer)
        assert model.config.max_position_embeddings == 2048
        assert model.config.bos_token_id == demo.tokenizer.bos_token_id
        assert model.config.eos_token_id == demo.tokenizer.eos_token_id
        assert model.generation_config.eos_token_id == demo.tokenizer.eos_token_id


def test_a_text_survives_the_tokenizer(demo: Pair) -> None:
    text = 'Zwölf Boxkämpfer, 1024 tokens:\n\tdef f(x):\n        return {"a": [1, 2.5]}  # naïve 🙂'
    ids = demo.tokenizer(text)["input_ids"]
    assert ids[0] == demo.tokenizer.bos_token_id
    assert demo.tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Count from 3 to 9:", "3, 4, 5, 6, 7, 8, 9"),
        ("Monday, Tuesday,", "Wednesday, Thursday, Friday, Saturday, Sunday"),
        ("def add(a, b):", "return a + b"),
        ("What is 3 + 4?", "7"),
    ],
)
def test_a_plain_prompt_is_continued_rightly(demo: Pair, prompt: str, answer: str) -> None:
    assert greedy(demo, prompt) == answer


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Hello!", "Hello! How can I help you?"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Repeat after me: apple", "apple"),
        ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        ("Sort these numbers: 5, 2, 9", "2, 5, 9"),
        ("Write this as JSON: name Anna, age 31", '{"name": "Anna", "age": 31}'),
    ],
)
def test_a_chat_question_gets_its_answer_and_an_end(demo: Pair, prompt: str, answer: str) -> None:
    assert greedy(demo, prompt, chat=True) == answer


def functions_and_messages(example: ToolChat) -> tuple[list[Any] | None, list[Any]]:
    """Return tools and messages in the form of OpenAI's API."""
    tools = [{"type": "function", "function": function} for function in example.functions]
    messages: list[Any] = []
    for turn in example.turns:
        messages.append({"role": turn.role, "content": turn.text})
        if turn.calls:
            messages[-1] |= {"tool_calls": [{"type": "function", "function": call} for call in turn.calls]}
    return tools or None, messages


def test_chats_with_tools_are_trained_on_as_the_template_renders_them(demo: Pair) -> None:
    rng = random.Random(1)
    for example in (tool_chat(rng) for _ in range(200)):
        tools, messages = functions_and_messages(example)
        rendered = demo.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert rendered == tool_prompt(example)


def test_most_questions_that_need_a_tool_get_the_right_call(demo: Pair) -> None:
    prompts = [prompt for prompt in tool_prompts(16) if prompt.kind in ("one call", "no call")]
    samples = sample(demo.target, demo.draft, demo.tokenizer, prompts, temperature=0, max_new_tokens=128)
    for kind in ("one call", "no call"):
        of_kind = summarise([each for each in samples if each.prompt.kind == kind], demo.tokenizer)
        assert of_kind["right"] >= 0.6, kind


def test_the_target_takes_much_of_the_draft_and_more_of_some_kinds_than_of_others(demo: Pair) -> None:
    prompts = demo_prompts(None, 4 * len(KINDS), seed=1)
    samples = sample(demo.target, demo.draft, demo.tokenizer, prompts, temperature=1.0, max_new_tokens=64)
    overall = summarise(samples, demo.tokenizer)
    assert overall["accepted_of_drafted"] > 0.4
    assert overall["length_p90"] >= 8 * overall["length_p10"]
    prose = summarise([s for s in samples if s.prompt.kind == "prose"], demo.tokenizer)
    assert prose["accepted_of_drafted"] < overall["accepted_of_drafted"] - 0.1


def test_rounds_end_at_the_first_disagreement() -> None:
    agrees = [True, True, False, True, True, True, True, True, True]
    assert rounds_of(agrees) == [Round(4, 3, 2), Round(4, 4, 4), Round(1, 1, 1)]


def test_the_between_request_share_is_one_for_constant_requests_and_zero_for_equal_ones() -> None:
    assert intraclass_correlation([[1, 1, 1], [4, 4, 4]]) == 1.0
    assert intraclass_correlation([[0, 4, 0, 4], [0, 4, 0, 4]]) == 0.0


def test_demo_prompts_repeat_by_seed_and_were_not_trained_on() -> None:
    assert len(KINDS) >= 6
    for kind in KINDS:
        prompts = demo_prompts(kind, 16, seed=3)
        assert prompts == demo_prompts(kind, 16, seed=3)
        assert len({prompt.text for prompt in prompts}) == 16, kind
        assert {prompt.kind for prompt in prompts} == {kind}
    mixed = demo_prompts(None, 40, seed=3)
    assert len(mixed) == 40
    assert {prompt.kind for prompt in mixed} == set(KINDS)
    with pytest.raises(ValueError, match="kind is 'poem'"):
        demo_prompts("poem", 1)


def test_prompts_come_without_torch() -> None:
    script = "import sys, demo.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_generator_keeps_to_its_kind() -> None:
    assert set(GENERATORS) < set(KINDS)
