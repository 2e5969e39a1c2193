"""Batches of packed documents.

One batch is a rectangle. A document sees only itself: the attention mask is block-diagonal and positions
start again at every document. Completions carry the loss; what stands before them counts a tenth.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from demo.corpus import EOS, PAD, TOKEN_SHARES, Corpus, Document
from demo.tokenizer import special_id

PROMPT_LOSS_WEIGHT: Final = 0.1
SHORT_ROW_TOKENS: Final = 256
LONG_ROW_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """A rectangle of packed documents."""

    ids: Tensor  # [rows, tokens] int64
    positions: Tensor  # [rows, tokens] int64, from 0 in every document
    owners: Tensor  # [rows, tokens] int64, the number of the document in its row, -1 for padding
    labels: Tensor  # [rows, tokens] int64, the next token of the same document
    weights: Tensor  # [rows, tokens] float32, 0 where there is no next token
    kinds: Tensor  # [rows, tokens] int64, index into the kinds of TOKEN_SHARES, -1 for padding

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        fields = (self.ids, self.positions, self.owners, self.labels, self.weights, self.kinds)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in fields))

    def mask(self) -> Tensor:
        """[rows, 1, tokens, tokens] bool, True where the query (third) may see the key (fourth)."""
        tokens = self.ids.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.owners[:, :, None] == self.owners[:, None, :]) & causal)[:, None]


@dataclass(frozen=True, slots=True)
class _Encoded:
    kind: int
    ids: list[int]
    prompt_tokens: int


class Packer:
    """Turns the corpus into batches whose token shares follow `shares` exactly over time."""

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, shares: Mapping[str, float] = TOKEN_SHARES
    ) -> None:
        self._corpus = corpus
        self._shares = shares
        self._tokenizer = tokenizer
        self._kinds = list(corpus.streams)
        self._tokens_drawn = dict.fromkeys(self._kinds, 0)
        self._ready: dict[str, deque[_Encoded]] = {kind: deque() for kind in self._kinds}
        self._waiting_long: deque[_Encoded] = deque()
        self._eos_id = special_id(tokenizer, EOS)
        self._pad_id = special_id(tokenizer, PAD)

    def encode(self, documents: list[Document]) -> list[_Encoded]:
        """Prompt and completion are encoded apart, as they are when a model continues a prompt."""
        prompts = self._tokenizer.encode_batch([d.prompt for d in documents], add_special_tokens=False)
        completions = self._tokenizer.encode_batch(
            [d.completion for d in documents], add_special_tokens=False
        )
        encoded = []
        for document, prompt, completion in zip(documents, prompts, completions, strict=True):
            ids = [*prompt.ids, *completion.ids, self._eos_id][: LONG_ROW_TOKENS - 1]
            encoded.append(_Encoded(self._kinds.index(document.kind), ids, len(prompt.ids)))
        return encoded

    @property
    def waiting_tokens(self) -> int:
        """Tokens of documents too long for a short row."""
        return sum(len(document.ids) for document in self._waiting_long)

    def _next_document(self) -> _Encoded:
        """A document of the kind that is furthest behind its share."""
        kind = min(self._kinds, key=lambda k: self._tokens_drawn[k] / self._shares[k])
        ready = self._ready[kind]
        if not ready:
            stream = self._corpus.streams[kind]
            ready.extend(self.encode([next(stream) for _ in range(128)]))
        document = ready.popleft()
        self._tokens_drawn[kind] += len(document.ids)
        return document

    def batch(self, *, row_tokens: int, rows: int) -> Batch:
        """Fill rows first-fit until four documents in a row found no room."""
        placed: list[list[_Encoded]] = [[] for _ in range(rows)]
        room = [row_tokens] * rows

        def place(document: _Encoded) -> bool:
            for row in range(rows):
                if len(document.ids) <= room[row]:
                    placed[row].append(document)
                    room[row] -= len(document.ids)
                    return True
            return False

        misses = 0
        while misses < 4:
            takes_long = row_tokens > SHORT_ROW_TOKENS and self._waiting_long
            document = self._waiting_long.popleft() if takes_long else self._next_document()
            if len(document.ids) > row_tokens or not place(document):
                misses += row_tokens >= len(document.ids)
                self._waiting_long.append(document)
                if takes_long:
                    break
        return self._collate(placed, row_tokens)

    def _collate(self, placed: list[list[_Encoded]], row_tokens: int) -> Batch:
        shape = (len(placed), row_tokens)
        ids = torch.full(shape, self._pad_id)
        positions = torch.zeros(shape, dtype=torch.int64)
        owners = torch.full(shape, -1)
        labels = torch.zeros(shape, dtype=torch.int64)
        weights = torch.zeros(shape)
        kinds = torch.full(shape, -1)
        for row, documents in enumerate(placed):
            start = 0
            for number, document in enumerate(documents):
                n = len(document.ids)
                span = slice(start, start + n)
                tokens = torch.tensor(document.ids)
                ids[row, span] = tokens
                positions[row, span] = torch.arange(n)
                owners[row, span] = number
                kinds[row, span] = document.kind
                labels[row, start : start + n - 1] = tokens[1:]
                first_loss = max(document.prompt_tokens - 1, 0)
                weights[row, start : start + min(first_loss, n - 1)] = PROMPT_LOSS_WEIGHT
                weights[row, start + first_loss : start + n - 1] = 1.0
                start += n
        return Batch(ids, positions, owners, labels, weights, kinds)


def batches(packer: Packer, tokens_per_batch: int) -> Iterator[Batch]:
    """Short rows; long ones as soon as long documents fill them. Attention costs by the square of the row."""
    while True:
        row_tokens = LONG_ROW_TOKENS if packer.waiting_tokens >= tokens_per_batch else SHORT_ROW_TOKENS
        yield packer.batch(row_tokens=row_tokens, rows=max(1, tokens_per_batch // row_tokens))


class _Source(IterableDataset[Batch]):
    """Batches of a corpus of its own in each process that loads them."""

    def __init__(
        self,
        seed: int,
        text_folder: Path | None,
        tokenizer: Tokenizer,
        tokens_per_batch: int,
        shares: Mapping[str, float],
    ) -> None:
        self._seed = seed
        self._shares = shares
        self._text_folder = text_folder
        self._tokenizer = tokenizer
        self._tokens_per_batch = tokens_per_batch

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self._seed if worker is None else 1000 * (self._seed + 1) + worker.id
        packer = Packer(Corpus(seed, self._text_folder), self._tokenizer, self._shares)
        return batches(packer, self._tokens_per_batch)


def loaded_batches(
    seed: int,
    text_folder: Path | None,
    tokenizer: Tokenizer,
    *,
    tokens_per_batch: int,
    shares: Mapping[str, float] = TOKEN_SHARES,
    loaders: int = 0,
) -> Iterator[Batch]:
    """Batches for one training, packed by `loaders` processes, or by this one if that is 0."""
    source = _Source(seed, text_folder, tokenizer, tokens_per_batch, shares)
    if loaders == 0:
        return iter(source)
    return iter(DataLoader(source, batch_size=None, num_workers=loaders, prefetch_factor=8))
