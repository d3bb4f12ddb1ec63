"""A small transformer over characters, and batches of the text that the examples train on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from topics import documents
from torch import nn
from torch.nn import functional

CONTEXT, WIDTH, HEADS, LAYERS = 192, 64, 4, 2
PADDING = -100  # what cross_entropy takes for no target


class Transformer(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)

    def body(self, text: torch.Tensor) -> torch.Tensor:
        """Shape (sequences, length) to (sequences, length, WIDTH)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.embedding(text) + self.position.weight[:length]
        hidden: torch.Tensor = self.layers(inputs, mask=mask, is_causal=True)
        return hidden

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits: shape (sequences, length) to (sequences, length, characters)."""
        logits: torch.Tensor = self.head(self.body(text))
        return logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of the characters that there are; a mean over them, or their sum."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction=reduction)


def batches(sequences: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of texts and their next characters, padded, without end. Texts differ much in length."""
    texts, rng = documents()[0], np.random.default_rng(seed)
    while True:
        chosen = [texts[i] for i in rng.integers(len(texts), size=sequences)]
        ends = [int(rng.integers(16, CONTEXT + 1)) for _ in chosen]
        pieces = [torch.from_numpy(text[: end + 1].astype(np.int64)) for text, end in zip(chosen, ends, strict=True)]
        padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=PADDING)
        yield padded[:, :-1].clamp(min=0), padded[:, 1:]


def model() -> Transformer:
    """A new one, always the same."""
    torch.manual_seed(0)
    return Transformer(len(documents()[1]))


def count(targets: torch.Tensor) -> int:
    """How many characters there are to be predicted."""
    return int((targets != PADDING).sum())
