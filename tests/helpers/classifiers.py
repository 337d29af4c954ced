"""Tiny ...ForSequenceClassification models of the supported families, scored by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.models import tiny_family_folder
from helpers.policies import random_tokens

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HELPSTEER = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
LENGTHS = (3, 17, 1, 40, 9, 2)
VOCAB_SIZE = 61
PAD_ID = 0


def classifier_folder(folder: Path, family: str, num_labels: int, **keys: Any) -> Path:
    """Write a model whose heads and vocabulary need padding at TP=2.

    Five labels get HelpSteer's names.
    """
    names = HELPSTEER
    if num_labels != len(HELPSTEER):
        names = tuple(f"LABEL_{i}" for i in range(num_labels))
    return tiny_family_folder(
        folder,
        family,
        head="AutoModelForSequenceClassification",
        seed=num_labels,
        vocab_size=VOCAB_SIZE,
        hidden_size=36,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=False,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
        **keys,
    )


def sequences_to_score() -> list[list[int]]:
    """Return sequences of several lengths; the second to last ends with padding tokens."""
    tokens = random_tokens(VOCAB_SIZE, len(LENGTHS), max(LENGTHS), seed=3).tolist()
    plain = [row[:length] for row, length in zip(tokens, LENGTHS, strict=True)]
    return [*plain, [1, 7, 8, 2], [5, 6, PAD_ID, PAD_ID], [PAD_ID, PAD_ID]]


@torch.no_grad()
def transformers_scores(folder: Path, sequences: list[list[int]], *, padded: bool) -> torch.Tensor:
    """Return [N, K], scored one at a time or as one right-padded batch."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    if not padded:
        return torch.cat([model(torch.tensor([sequence])).logits for sequence in sequences])
    width = max(map(len, sequences))
    tokens = torch.full((len(sequences), width), PAD_ID)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return model(tokens, attention_mask=mask).logits
