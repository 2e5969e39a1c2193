"""The demo pair's tokenizer: trained on the corpus, written as Hugging Face has it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.corpus import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS, Corpus

VOCAB_SIZE: Final = 1024
MAX_POSITIONS: Final = 2048
TOKENIZER_DOCUMENTS_PER_KIND: Final = 3000


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token; ValueError if the tokenizer lacks it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer lacks the special token {token}")
    return int(token_id)


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own, so that arithmetic and counting see places."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for kind, stream in corpus.streams.items():
            n = round(TOKENIZER_DOCUMENTS_PER_KIND * (2.0 if kind in ("prose", "source") else 1.0))
            for _, document in zip(range(n), stream, strict=False):
                text = document.prompt + document.completion
                for special in SPECIAL_TOKENS:
                    text = text.replace(special, "")
                yield text

    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    bos_id = special_id(tokenizer, BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, bos_id)]
            ),
        ]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, and a tokenizer_config.json that holds the chat template as well."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
