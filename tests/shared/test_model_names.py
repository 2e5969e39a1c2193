"""Models by directory or by their name on the hub: where they are, what they are called, whether a pair fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from laps_sd.errors import StartupError
from laps_sd.service.hub import is_hub_name, local_model
from laps_sd.service.model_dir import POSITIONS, context_tokens, end_ids, served_name, stored_dtype
from laps_sd.service.tokenizer_match import TokenizersDiffer, check_tokenizers, vocabulary, vocabulary_digest

DEMO = Path(__file__).parents[2] / "worker_svc" / "demo"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of the hub on a machine without a network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def put(hub: Path, organisation: str, name: str, source: Path) -> Path:
    """Put a model where a download would."""
    repository = hub / f"models--{organisation}--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    return Path(shutil.copytree(source, repository / "snapshots" / "abc123"))


def test_a_model_of_the_hub_that_was_downloaded_is_found_without_a_network(hub: Path) -> None:
    directory = put(hub, "acme", "small", DEMO / "target")

    assert local_model(Path("acme/small")) == directory
    assert local_model(Path("acme/small"), weights=False) == directory


def test_the_code_of_a_model_comes_with_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be allowed to run it, a gateway never is."""
    fetched: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append(allow_patterns)
        return str(DEMO / "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    local_model(Path("acme/small"))
    local_model(Path("acme/small"), weights=False)

    assert ["*.py" in patterns for patterns in fetched] == [True, False]


def test_weights_that_are_not_fetched_are_an_error_with_the_command_that_downloads_them(hub: Path) -> None:
    directory = put(hub, "acme", "small", DEMO / "target")
    (directory / "model.safetensors").unlink()

    assert local_model(Path("acme/small"), weights=False) == directory
    with pytest.raises(StartupError, match=r"has no safetensors\. `hf download acme/small` downloads them"):
        local_model(Path("acme/small"))

    (directory / "pytorch_model.bin").touch()
    assert local_model(Path("acme/small")) == directory


@pytest.mark.parametrize(
    ("named", "command"),
    [("acme/small", "`hf download acme/small`"), ("acme/small@v2", "`hf download acme/small --revision v2`")],
)
def test_a_model_that_is_not_here_is_an_error_with_the_command_that_downloads_it(
    hub: Path, named: str, command: str
) -> None:
    with pytest.raises(StartupError) as refused:
        local_model(Path(named))

    sentence = str(refused.value)
    assert sentence.startswith(
        f"There is no directory {named}, and the model acme/small of the Hugging Face hub"
    )
    assert command in sentence and "\n" not in sentence


def test_a_directory_is_never_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert not is_hub_name(Path("acme/small"))
    assert is_hub_name(Path("acme/large"))
    assert local_model(Path("acme/small")) == Path("acme/small")
    assert local_model(Path("/nowhere")) == Path("/nowhere")


def test_a_model_is_served_under_its_name_or_that_of_its_directory(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")

    assert served_name(Path("acme/small@v2")) == "acme/small"
    assert served_name(put(hub, "acme", "small", DEMO / "target")) == "acme/small"
    assert served_name(tmp_path / "mine") == served_name(Path()) == "mine"


@pytest.mark.parametrize("name", POSITIONS)
def test_the_context_limit_is_read_under_each_name_that_models_give_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 640}))
    assert context_tokens(tmp_path, None) == 640

    (tmp_path / "config.json").write_text(json.dumps({"text_config": {name: 99_999}}))
    assert context_tokens(tmp_path, None) == 8192


@pytest.mark.parametrize(
    ("config", "limit", "dtype"),
    [
        ('{"text_config": null, "max_position_embeddings": 640, "torch_dtype": "bfloat16"}', 640, "bfloat16"),
        ("[640]", None, "float32"),
        ("640", None, "float32"),
        ("[" * 100_000, None, "float32"),
    ],
)
def test_a_config_of_an_unusual_form_is_read_as_far_as_it_goes(
    tmp_path: Path, config: str, limit: int | None, dtype: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert (context_tokens(tmp_path, None), stored_dtype(tmp_path)) == (limit, dtype)


def words(directory: Path, tokens: list[str]) -> Path:
    directory.mkdir()
    numbered = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token=tokens[0]))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_a_vocabulary_is_that_of_the_tokenizer_with_its_added_tokens(tmp_path: Path) -> None:
    read = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")).get_vocab(with_added_tokens=True)
    assert vocabulary(DEMO / "target") == {number: token for token, number in read.items()}

    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary(tmp_path) == {0: "<unk>", 1: "a"}


def test_equal_vocabularies_have_an_equal_digest_in_whatever_form_the_file_is(tmp_path: Path) -> None:
    again, other, broken = tmp_path / "again", words(tmp_path / "other", ["a", "b"]), tmp_path / "broken"
    for folder, text in (
        (
            again,
            json.dumps(
                json.loads((DEMO / "target" / "tokenizer.json").read_text()), indent=4, sort_keys=True
            ),
        ),
        (broken, "{"),
    ):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)

    assert vocabulary_digest(DEMO / "target") == vocabulary_digest(again)
    assert len({vocabulary_digest(DEMO / "target"), vocabulary_digest(other), b""}) == 3
    assert vocabulary_digest(broken) == vocabulary_digest(tmp_path) == b""


def test_a_pair_of_one_tokenizer_fits_and_either_may_have_further_tokens(tmp_path: Path) -> None:
    assert check_tokenizers(DEMO / "target", DEMO / "draft") == ""

    (tmp_path / "none").mkdir()
    assert check_tokenizers(DEMO / "target", tmp_path / "none") == ""


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    target = words(tmp_path / "target", [f"w{number}" for number in range(100)])
    draft = words(tmp_path / "draft", ["w0", "w1", *(f"v{number}" for number in range(2, 100))])

    with pytest.raises(TokenizersDiffer) as refused:
        check_tokenizers(target, draft)

    assert str(refused.value).startswith(
        "target and draft have different tokenizers: of 101 and 101 token ids 3 mean the same to both, and the first "
        "that differs is id 2: 'w2' in the target, 'v2' in the draft"
    )


def test_a_few_special_tokens_of_another_name_are_noted_and_not_refused(tmp_path: Path) -> None:
    target = words(tmp_path / "target", [f"w{number}" for number in range(100)])
    draft = words(tmp_path / "draft", [*(f"w{number}" for number in range(98)), "<tool>", "<mark>"])

    note = check_tokenizers(target, draft)

    assert note.startswith("2 token ids mean something else to the draft")
    assert "id 98: 'w98' in the target, '<tool>' in the draft" in note


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: KeyError: 'model'"):
        vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [5, 7]}, "config": {"eos_token_id": 1}}, {5, 7}),
        ({"generation_config": {"temperature": 1.0}, "config": {"eos_token_id": 1}}, {1}),
        ({"config": {"text_config": {"eos_token_id": 3}}}, {3}),
        ({"config": {"eos_token_id": -1}, "tokenizer_config": {"eos_token": "w4"}}, set()),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "w4"}}, {4}),
        ({"tokenizer_config": {"eos_token": {"content": "w4"}}}, {4}),
        ({"tokenizer_config": {"eos_token": "another"}}, set()),
        ({}, set()),
    ],
)
def test_gateway_and_worker_take_the_ends_of_texts_from_the_same_files(
    tmp_path: Path, files: dict[str, object], ends: set[int]
) -> None:
    words = {f"w{i}": i for i in range(8)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert end_ids(tmp_path) == ends
