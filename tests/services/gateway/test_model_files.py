"""The data that a gateway reads about a model, and the conversion of prompts into tokens."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.app import load_configured_model
from gateway.model.chat_template import ChatTemplate, TemplateRefused
from gateway.model.files import ModelFiles, ModelFilesError, load_model
from gateway.model.token_bytes import TokenBytes
from gateway.settings import GatewaySettings
from laps_sd.errors import StartupError
from laps_sd.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from tests.services.gateway.conftest import CONTEXT, Running, write_model
from tests.services.gateway.reading import violations

DEMO = Path(__file__).parents[3] / "worker_svc" / "demo" / "target"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"})


class TestModelFiles:
    def test_tell_context_vocabulary_and_ends(self, model: ModelFiles) -> None:
        assert model.context_tokens == CONTEXT
        assert model.vocab_size == 320
        assert model.eos_ids == {model.tokenizer.token_to_id("<|end|>")}
        assert model.eos_ids < model.silent_ids

    def test_plain_text_gets_a_begin_token_and_rendered_text_does_not(self, model: ModelFiles) -> None:
        begin = model.tokenizer.token_to_id("<|begin|>")

        assert model.encode_text("hi")[0] == begin
        assert model.encode_text("hi")[1:] == model.encode_rendered("hi")
        assert model.encode_rendered("<|begin|>hi") == model.encode_text("hi")

    @pytest.mark.parametrize(
        "text", ["", " a", "the quick<|end|> brown", "é\u0301 日本 \x00\n\n", "hello world " * 50]
    )
    def test_ids_are_those_of_the_library(self, model: ModelFiles, text: str) -> None:
        assert model.encode_text(text) == model.tokenizer.encode(text).ids
        assert model.encode_rendered(text) == model.tokenizer.encode(text, add_special_tokens=False).ids

    def test_a_limit_set_by_hand_wins(self, model_dir: Path) -> None:
        assert load_model(model_dir, name="tiny", context_tokens=64).context_tokens == 64

    def test_the_shipped_model_can_be_read(self) -> None:
        demo = load_model(DEMO, name="laps-sd-demo")

        assert demo.template is not None
        rendered = demo.template.render([{"role": "user", "content": "hi"}])
        assert demo.decode(demo.encode_rendered(rendered)) == rendered
        assert demo.encode_rendered(rendered)[0] == demo.encode_text("x")[0]

    def test_without_a_directory_the_shipped_model_is_served(self) -> None:
        assert load_configured_model(GatewaySettings()).name == "laps-sd-demo"

    @pytest.mark.parametrize(
        ("name", "content", "problem"),
        [
            ("tokenizer.json", None, "the file is missing"),
            ("tokenizer.json", "{}", "not a tokenizer"),
            ("config.json", "{", "not valid JSON"),
            ("config.json", "[]", "JSON object"),
            ("config.json", "{}", "no context limit .max_position_embeddings, or n_positions"),
            ("chat_template.jinja", "{% for %}", "not valid Jinja"),
            ("tokenizer_config.json", json.dumps({"chat_template": "{{ x"}), "not valid Jinja"),
            ("tokenizer_config.json", json.dumps({"chat_template": 3}), "must be a text"),
        ],
    )
    def test_a_file_that_cannot_be_used_is_named(
        self, tmp_path: Path, name: str, content: str | None, problem: str
    ) -> None:
        directory = write_model(tmp_path)
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_text(content)

        with pytest.raises(ModelFilesError, match=problem) as error:
            load_model(directory, name="tiny")
        assert name in str(error.value)

    def test_a_tokenizer_of_mistral_common_is_named_with_what_to_do(self, tmp_path: Path) -> None:
        directory = write_model(tmp_path)
        (directory / "tokenizer.json").rename(directory / "tekken.json")

        with pytest.raises(
            ModelFilesError, match=r"/tekken\.json must be converted: docs/troubleshooting\.md"
        ):
            load_model(directory, name="tiny")

    def test_the_process_does_not_start_without_them(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match="LAPS_SD_TOKENIZER_DIR"):
            load_configured_model(GatewaySettings(model="mine"))
        with pytest.raises(StartupError, match="LAPS_SD_ADAPTERS has 'mine', which is a name of the model"):
            load_configured_model(GatewaySettings(model_aliases=("mine",), adapters=("mine=/adapters/mine",)))
        with pytest.raises(StartupError, match=r"tokenizer\.json"):
            load_configured_model(GatewaySettings(tokenizer_dir=tmp_path))


class TestChatTemplate:
    def test_a_file_of_its_own_wins(self, tmp_path: Path) -> None:
        directory = write_model(tmp_path)
        (directory / "chat_template.jinja").write_text("{{ messages | length }}{{ eos_token }}")
        read = load_model(directory, name="tiny")

        assert read.template is not None
        assert read.template.render([{"role": "user", "content": "hi"}]) == "1<|end|>"

    def test_of_several_the_default_is_taken(self, tmp_path: Path) -> None:
        directory = write_model(tmp_path)
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        read = load_model(directory, name="tiny")

        assert read.template is not None
        assert read.template.render([]) == "d"

    def test_a_model_may_have_none(self, tmp_path: Path) -> None:
        assert load_model(write_model(tmp_path, template=None), name="tiny").template is None

    def test_has_what_templates_of_models_use(self) -> None:
        source = (
            "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
            "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
        )
        rendered = template(source).render(
            [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
        )

        assert rendered == '<s>{"role": "user", "content": "é<"}4'

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception('only one') }}",
            "{{ messages[5].content.x }}",
            "{{ 1 / 0 }}",
            "{{ messages + 3 }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{% for i in range(1000000) %}{% endfor %}",
            "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        ],
    )
    def test_whatever_goes_wrong_inside_is_a_refusal(self, source: str) -> None:
        with pytest.raises(TemplateRefused):
            template(source).render([{"role": "user", "content": "hi"}])

    @pytest.mark.parametrize(
        "later",
        [
            "{{ raise_exception('System message must be at the beginning.') }}",
            "",
        ],
        ids=["refused", "left out"],
    )
    def test_that_has_no_place_for_later_instructions_gets_them_in_other_messages(self, later: str) -> None:
        made = template(
            "{% for message in messages %}"
            f"{{% if message.role == 'system' and not loop.first %}}{later}"
            "{% else %}<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
        )
        one, two, three = ({"role": "system", "content": text} for text in ("one", "two", "three"))
        user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}

        assert made.render([one, user, answer]) == "<system>one<user>hi<assistant>so"
        assert made.render([one, two, user]) == "<system>one\n\ntwo<user>hi"
        assert made.render([one, user, two]) == "<system>one<user>hi\n\ntwo"
        assert (
            made.render([one, user, two, answer, user]) == "<system>one<user>hi\n\ntwo<assistant>so<user>hi"
        )
        assert (
            made.render([user, answer, two, three, user]) == "<user>hi<assistant>so<user>two\n\nthree\n\nhi"
        )
        assert made.render([user, answer, two]) == "<user>hi<assistant>so<user>two"
        assert (
            made.render([user, {"role": "tool", "content": "33"}, two]) == "<user>hi<user>Result: 33\n\ntwo"
        )

    @pytest.mark.parametrize("name", ["demo", "plain"])
    def test_that_has_a_place_for_later_instructions_gets_them_there(self, name: str) -> None:
        source = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        made = template(source) if name == "plain" else load_model(DEMO, name="demo").template
        assert made is not None
        chat = [{"role": role, "content": role} for role in ("system", "user", "system")]
        assert made.render(chat, add_generation_prompt=False).count("system") == 4

    def test_that_refuses_an_effort_gets_the_nearest_that_it_knows(self) -> None:
        made = template(
            "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') %}"
            "{{ raise_exception('Unexpected reasoning effort') }}{% endif %}"
            "{{ reasoning_effort | default('open') }}"
        )
        user = {"role": "user", "content": "hi"}
        efforts = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
        rendered = [made.render([user], arguments={"reasoning_effort": effort}) for effort in efforts]

        assert rendered == ["open", "low", "low", "medium", "medium", "xhigh", "xhigh"]
        with pytest.raises(TemplateRefused):
            made.render([user], arguments={"reasoning_effort": "enormous"})
        assert (
            template("{{ reasoning_effort }}").render([user], arguments={"reasoning_effort": "high"})
            == "high"
        )

    async def test_a_refusal_reaches_the_client_as_an_invalid_argument(self, running: Running) -> None:
        messages = ChatMessages(messages=[ChatMessage(role="assistant", content="me first")])

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(messages=messages))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(error.value) == [
            ("messages", "do not fit the chat template: the assistant cannot begin")
        ]


class TestPieces:
    """The bytes of single tokens, for log probabilities."""

    TEXT = "the quick €, über"

    def test_of_a_byte_level_tokenizer_make_up_the_text(self, model: ModelFiles) -> None:
        ids = model.encode_rendered(self.TEXT)

        assert b"".join(map(model.token_bytes.bytes_of, ids)).decode() == self.TEXT
        assert model.token_bytes.bytes_of(ids[-1]) == b"er"
        assert model.token_bytes.joins

    @pytest.mark.parametrize("sequence", [True, False])
    def test_of_a_sentence_piece_tokenizer_keep_their_blanks_and_bytes(self, sequence: bool) -> None:
        blank = decoders.Replace("▁", " ") if sequence else decoders.Metaspace()
        vocabulary = {"<unk>": 0, "▁the": 1, "▁quick": 2, "▁": 3} | {
            f"<0x{n:02X}>": 4 + n for n in range(256)
        }
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse()])
        pieces = TokenBytes(tokenizer)

        assert [pieces.bytes_of(token) for token in (1, 2, 3)] == [b" the", b" quick", b" "]
        assert b"".join(pieces.bytes_of(4 + octet) for octet in "€".encode()).decode() == "€"
        assert not pieces.joins

    def test_of_any_other_tokenizer_are_their_texts(self) -> None:
        tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
        pieces = TokenBytes(tokenizer)

        assert [pieces.bytes_of(token) for token in (1, 99)] == [b"the", b""]

    def test_of_added_tokens_are_what_they_are_written_as(self, model: ModelFiles) -> None:
        assert [model.token_bytes.bytes_of(token) for token in sorted(model.silent_ids)][:2] == [
            b"<|begin|>",
            b"<|end|>",
        ]
