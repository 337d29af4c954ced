"""Tiny ...ForSequenceClassification models of the supported families, scored by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.models import randomize
from helpers.policies import random_tokens
from helpers.tiny_tokenizer import write_tiny_tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HELPSTEER = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
LENGTHS = (3, 17, 1, 40, 9, 2)
VOCAB_SIZE = 61
PAD_ID = 0


def classifier_folder(folder: Path, family: str, num_labels: int, **keys: Any) -> Path:
    """Write a model whose heads and vocabulary need padding at TP=2.

    Five labels get HelpSteer's names.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    names = (
        HELPSTEER
        if num_labels == len(HELPSTEER)
        else tuple(f"LABEL_{i}" for i in range(num_labels))
    )
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 256,
        "pad_token_id": PAD_ID,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        **keys,
    }
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **values))
    randomize(model, seed=num_labels, logit_scale=2.0)
    model.save_pretrained(folder)
    return write_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)


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
    tokens = torch.full((len(sequences), max(map(len, sequences))), PAD_ID)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return model(tokens, attention_mask=mask).logits
