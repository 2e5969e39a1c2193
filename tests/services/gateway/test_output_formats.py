"""Output formats of a body as formats of the library that follows them."""

from __future__ import annotations

import llguidance
import pytest
from tokenizers import Tokenizer

from gateway.api.openai.models import CompletionBody
from gateway.api.openai.output_formats import read_format
from gateway.model.files import ModelFiles
from laps_sd.contract.formats import matcher_of


@pytest.fixture(scope="module")
def library_tokenizer(model: ModelFiles) -> llguidance.LLTokenizer:
    tokenizer: Tokenizer = model.tokenizer
    return llguidance.LLTokenizer(tokenizer.to_str(), eos_token=sorted(model.eos_ids))


def test_a_choice_matches_its_texts_and_nothing_else(
    model: ModelFiles, library_tokenizer: llguidance.LLTokenizer
) -> None:
    """Whatever characters they hold."""
    texts = [chr(code) for code in range(32, 127)] + ["ab", "\u20ac\n\t", "<a-b>", "x y", "\\d"]
    body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": {"choice": texts}})
    _, wanted = read_format(body)
    assert wanted is not None
    for text, right in [(text, True) for text in texts] + [("abc", False), ("\u20ac", False), ("1d", False)]:
        matcher = matcher_of("regex", wanted.regex, library_tokenizer)
        ids = model.encode_rendered(text)
        taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert taken is right, text
