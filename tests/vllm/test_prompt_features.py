"""What the scheduler inside vLLM reads of a prompt: the words of its last message. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from laps_sd.contract.length_features import FeatureHash, packed, unpacked
from laps_vllm.prompt_features import (
    READ_TOKENS,
    PromptTokens,
    PromptWords,
    last_message,
    special_ids,
    text_end_ids,
)
from worker_svc.demo import TARGET_DIR

TEMPLATES = {
    "ChatML": (
        ("<|im_start|>", "<|im_end|>"),
        """
        {% for m in messages %} <|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}
        <|im_start|> assistant
        """,
    ),
    "Llama 3": (
        ("<begin>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        """
        <begin> {% for m in messages %}
        <|start_header_id|> {{ m.role }} <|end_header_id|> {{ m.content }} <|eot_id|>
        {% endfor %}
        <|start_header_id|> assistant <|end_header_id|> newline
        """,
    ),
    "Mistral": (
        ("<begin>", "<end>", "[INST]", "[/INST]"),
        """
        <begin> {% for m in messages %}
        {% if m.role == 'assistant' %} {{ m.content }} <end> {% else %} [INST] {{ m.content }} [/INST] {% endif %}
        {% endfor %}
        """,
    ),
    "Gemma": (
        ("<begin>", "<start_of_turn>", "<end_of_turn>"),
        """
        <begin> {% for m in messages %} <start_of_turn> {{ m.role }} {{ m.content }} <end_of_turn> {% endfor %}
        <start_of_turn> model
        """,
    ),
    "Harmony": (
        ("<|start|>", "<|message|>", "<|end|>"),
        """
        {% for m in messages %} <|start|> {{ m.role }} <|message|> {{ m.content }} <|end|> {% endfor %}
        <|start|> assistant
        """,
    ),
}
"""Chat templates in the form of these models', with a space around everything, and their special tokens."""
NAMES = ("system", "user", "assistant", "model", "newline")
WORDS = (
    "be",
    "brief",
    "how",
    "are",
    "you",
    "fine",
    "and",
    "hi",
    "tell",
    "me",
    "a",
    "story",
    "about",
    "foxes",
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine and you"},
    {"role": "user", "content": "tell me a story about foxes"},
]


def tokenizer_for(special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words; only some of its special tokens have a role of their own."""
    vocabulary = {word: number for number, word in enumerate((*special, *NAMES, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[-1])


class CountingTokenizer:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.decoded = 0
        self._tokenizer = tokenizer
        self.all_special_ids = list(tokenizer.added_tokens_decoder)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded += 1
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def prompt(kind: str, messages: list[dict[str, str]]) -> tuple[PreTrainedTokenizerFast, list[int]]:
    special, template = TEMPLATES[kind]
    tokenizer = tokenizer_for(special)
    tokenizer.chat_template = template
    return tokenizer, tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def message_in(tokenizer: Any, ids: list[int]) -> str:
    words = PromptWords(tokenizer)
    special, ends = frozenset(special_ids(tokenizer)), frozenset(text_end_ids(tokenizer))
    found = last_message(ids, special, ends, words._text)
    return str(tokenizer.decode(ids[found.begin : found.end]))


@pytest.mark.parametrize("kind", TEMPLATES)
class TestTheLastMessageOfAChat:
    def test_is_found_by_the_special_tokens_around_it(self, kind: str) -> None:
        tokenizer, ids = prompt(kind, CHAT)
        assert message_in(tokenizer, ids).removeprefix("user ") == "tell me a story about foxes"

    def test_of_one_word_too(self, kind: str) -> None:
        tokenizer, ids = prompt(kind, [*CHAT[:3], {"role": "user", "content": "hi"}])
        assert message_in(tokenizer, ids).removeprefix("user ") == "hi"

    def test_alone_too(self, kind: str) -> None:
        tokenizer, ids = prompt(kind, CHAT[3:])
        assert message_in(tokenizer, ids).removeprefix("user ") == "tell me a story about foxes"

    def test_instructions_before_it_are_one_mark(self, kind: str) -> None:
        read = {}
        for first in ("be brief", "be fine", "be brief and fine"):
            tokenizer, ids = prompt(kind, [{"role": "system", "content": first}, CHAT[3]])
            read[first] = set(unpacked(PromptWords(tokenizer).features_of(ids, None, False)))
        common = set.intersection(*read.values())
        assert [len(found - common) for found in read.values()] == [1, 1, 1]


IMAGE = ["<image>", *["<pad>"] * 64, "</image>"]


class TestImages:
    def read(self, kind: str, content: list[str], *, before: int = 3) -> tuple[str, set[int]]:
        """Return the last message of a chat, which has this content, and the features of the whole."""
        special, template = TEMPLATES[kind]
        tokenizer = tokenizer_for((*special, "<image>", "<pad>", "</image>"))
        tokenizer.eos_token = "<end>" if "<end>" in special else special[-1]
        tokenizer.chat_template = template
        messages = [*CHAT[:before], {"role": "user", "content": " ".join(content)}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return message_in(tokenizer, ids), set(unpacked(PromptWords(tokenizer).features_of(ids, None, False)))

    @pytest.mark.parametrize(
        "content",
        [IMAGE, IMAGE + IMAGE, IMAGE[1:-1], IMAGE[1:2], []],
        ids=["one", "two", "pads alone", "one pad", "nothing"],
    )
    @pytest.mark.parametrize("kind", ["ChatML", "Llama 3", "Gemma", "Harmony"])
    def test_a_message_that_is_one_has_no_words(self, kind: str, content: list[str]) -> None:
        for before in (1, 3):
            message, features = self.read(kind, content, before=before)
            assert message == ""
            assert not features & set(FeatureHash().features_of("be brief fine and you"))

    def test_nor_is_the_answer_before_it_read_where_no_role_is_named(self) -> None:
        assert self.read("Mistral", IMAGE)[0] == ""

    @pytest.mark.parametrize("content", [[*IMAGE, "how"], ["how", *IMAGE], ["how", *IMAGE, *IMAGE]])
    @pytest.mark.parametrize("kind", TEMPLATES)
    def test_the_words_of_a_message_with_one_are_read(self, kind: str, content: list[str]) -> None:
        assert self.read(kind, content)[0].removeprefix("user ") == "how"


class TestRolesThatAreNoSpecialTokens:
    """The only special tokens of these templates begin a text and end an answer."""

    def tokenizer(self, *added: str) -> PreTrainedTokenizerFast:
        tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
        tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
        return tokenizer

    def message_in(self, text: str, *added: str) -> str:
        tokenizer = self.tokenizer(*added)
        return message_in(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("<s>[INST] How are you? [/INST] Fine.</s>[INST] A story. [/INST]", "[INST] A story. [/INST]"),
            ("<s>USER: How? ASSISTANT: So.</s>USER: A story. ASSISTANT:", "USER: A story. ASSISTANT:"),
            ("### User:\nA story.</s>\n### Assistant:\n", "### User:\nA story."),
            ("User: A story.</s>Assistant: Sure", "User: A story."),
            ("A text.</s>Another text", "Another text"),
            ("<s>A story.</s>", "A story."),
        ],
        ids=["Llama 2", "Vicuna", "headings", "begun answer", "two texts", "ended"],
    )
    def test_the_message_follows_the_end_of_the_last_answer(self, prompt: str, message: str) -> None:
        assert self.message_in(prompt) == message

    @pytest.mark.parametrize("thought", ["<think>\n", "</think>", ""])
    @pytest.mark.parametrize("before", ["", "<｜User｜>How are you?<｜Assistant｜>Fine.</s>"])
    def test_added_tokens_that_name_roles_are_around_it(self, before: str, thought: str) -> None:
        """As in DeepSeek's chats."""
        prompt = f"<s>Be brief.{before}<｜User｜>A story.<｜Assistant｜>{thought}"
        assert self.message_in(prompt, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>") == "A story."

    def test_an_end_that_is_there_twice_is_no_image(self) -> None:
        prompt = "<s>Be brief.<｜User｜>A story.</s></s><｜Assistant｜>"
        assert self.message_in(prompt, "<｜User｜>", "<｜Assistant｜>") == "A story."

    def test_other_added_tokens_are_text(self) -> None:
        prompt = "<s>Is <table> better\n\nthan <list>?"
        assert self.message_in(prompt, "<table>", "<list>", "\n\n") == prompt.removeprefix("<s>")


class TestOtherPrompts:
    @pytest.mark.parametrize("begin", [[], ["<begin>"]])
    def test_a_text_is_one_message(self, begin: list[str]) -> None:
        tokenizer = tokenizer_for(("<begin>", "<end>"))
        ids = tokenizer.convert_tokens_to_ids([*begin, "tell", "me", "a", "story"])
        assert message_in(tokenizer, ids) == "tell me a story"

    def test_special_tokens_alone_have_no_words(self) -> None:
        tokenizer = tokenizer_for(("<begin>", "<end>"))
        for count in (1, 2, 9):
            features = unpacked(PromptWords(tokenizer).features_of([0] * count, None, False))
            assert len(features) <= 2  # marks

    def test_ids_that_the_tokenizer_does_not_have_are_left_out(self) -> None:
        words = PromptWords(AutoTokenizer.from_pretrained(TARGET_DIR))
        assert words.features_of([1, 70_000], None, False) == words.features_of([1], None, False)

    @pytest.mark.parametrize("begin", [["tell", "me"], []])
    def test_placeholders_of_a_video_are_not_decoded(self, begin: list[str]) -> None:
        """They are special tokens, tens of thousands of them, and the engine waits meanwhile."""
        tokenizer = tokenizer_for(("<begin>", "<pad>", "<end>"))
        counting = CountingTokenizer(tokenizer)
        ids = tokenizer.convert_tokens_to_ids([*begin, *["<pad>"] * 2000, "<end>", "<begin>", "model"])
        features = unpacked(PromptWords(counting).features_of(ids, None, False))

        assert counting.decoded <= 4
        assert bool(begin) == (set(FeatureHash().features_of("tell me")) <= set(features))

    def test_names_of_roles_are_decoded_64_times_at_most(self) -> None:
        tokenizer = tokenizer_for(("<begin>", "<end>"))
        counting = CountingTokenizer(tokenizer)
        ids = tokenizer.convert_tokens_to_ids(["<begin>", "model"] * 2000)
        PromptWords(counting).features_of(ids, None, False)
        assert counting.decoded <= 65


class TestWords:
    def words(self) -> tuple[PromptWords, Any]:
        tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
        return PromptWords(tokenizer), tokenizer

    def test_are_those_that_a_gateway_sends(self) -> None:
        """So the start weights serve here too."""
        words, tokenizer = self.words()
        text = "Count from 3 to 12 in steps of 3:\nplease"
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert words.features_of(ids, None, False) == packed(FeatureHash().features_of(text))

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("<begin>user\n", "<end>\n<begin>assistant\n"),
            ("<begin>user<end>\n\n", "<end><begin>assistant<end>\n\n"),
            ("<begin>", "\n<begin>"),
        ],
        ids=["ChatML", "Llama 3", "Phi 3"],
    )
    @pytest.mark.parametrize("text", ["Name a fox.", "user:\n\nname a fox", "A line.\n" * 200 + "Short."])
    def test_are_those_of_the_message_alone(self, before: str, after: str, text: str) -> None:
        """The role in a line of its own and the blanks around a message are the template's."""
        _, tokenizer = self.words()
        tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<begin>", "<end>"]})
        ids = tokenizer(before + text + after, add_special_tokens=False).input_ids
        read = set(unpacked(PromptWords(tokenizer).features_of(ids, None, False)))
        alone = set(FeatureHash().features_of(text))
        marks = 2
        assert (len(read - alone), len(alone - read)) == (marks, 0)

    def test_of_a_long_message_are_those_at_its_two_ends(self) -> None:
        words, tokenizer = self.words()
        middle = tokenizer("filler\n" * 40_000, add_special_tokens=False).input_ids
        first = tokenizer("Summarise this for me. " * 40, add_special_tokens=False).input_ids
        last = tokenizer(" What happened at the end?" * 40, add_special_tokens=False).input_ids
        assert min(len(first), len(last)) > READ_TOKENS

        read = unpacked(words.features_of([*first, *middle, *last], None, False))
        assert read == unpacked(words.features_of([*first, *middle[:100], *last], None, False))

    def test_line_breaks_in_the_middle_of_a_long_message_count_as_those_at_its_ends(self) -> None:
        words, tokenizer = self.words()
        lines = tokenizer("one line\n" * 4000, add_special_tokens=False).input_ids
        assert set(FeatureHash().features_of_lines(33)) <= set(
            unpacked(words.features_of(lines, None, False))
        )

    def test_a_limit_and_a_format_are_marks(self) -> None:
        words, tokenizer = self.words()
        ids = tokenizer("One day", add_special_tokens=False).input_ids
        plain = set(unpacked(words.features_of(ids, None, False)))
        short, shorter, longer = (
            set(unpacked(words.features_of(ids, limit, False))) for limit in (20, 17, 900)
        )
        formatted = set(unpacked(words.features_of(ids, None, True)))

        assert len(short - plain) == len(longer - plain) == len(formatted - plain) == 1
        assert short == shorter != longer

    def test_what_follows_the_message_is_a_mark(self) -> None:
        """Some templates put an empty thought there, and the answer is shorter by far."""
        special, template = TEMPLATES["ChatML"]
        tokenizer = tokenizer_for(special)
        read = []
        for thought in ("", " be brief"):
            tokenizer.chat_template = template + thought
            ids = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
            read.append(set(unpacked(PromptWords(tokenizer).features_of(ids, None, False))))
        assert len(read[0] ^ read[1]) == 2

    def test_predictions_begin_with_the_start_weights(self) -> None:
        words, tokenizer = self.words()
        short, long = (
            words.features_of(tokenizer(text, add_special_tokens=False).input_ids, None, False)
            for text in ("Answer in one word: what is the capital of France?", "Write a long essay about the history of Rome.")
        )  # fmt: skip
        predictor = words.predictor()
        first, second = predictor.predict(short, "", ""), predictor.predict(long, "", "")

        assert first is not None
        assert second is not None
        assert first < second

    def test_a_key_gives_them_other_numbers_and_the_same_predictions(self) -> None:
        words, tokenizer = self.words()
        ids = tokenizer("Write a story about a fox", add_special_tokens=False).input_ids
        keyed = PromptWords(tokenizer, "a secret")
        plain_features, features = (each.features_of(ids, None, False) for each in (words, keyed))

        assert len(set(unpacked(features)) & set(unpacked(plain_features))) < 3
        predicted = words.predictor().predict(plain_features, "", "")
        assert keyed.predictor().predict(features, "", "") == pytest.approx(predicted)
        assert not words.predictor().restore(keyed.predictor().to_dict())

    def test_what_was_learnt_of_token_ids_is_not_used(self) -> None:
        learnt = PromptTokens(1024).predictor()
        words, _ = self.words()
        assert not words.predictor().restore(learnt.to_dict())
        assert words.predictor().restore(words.predictor().to_dict())
        assert not PromptTokens(1024).predictor().restore(PromptTokens(1025).predictor().to_dict())
