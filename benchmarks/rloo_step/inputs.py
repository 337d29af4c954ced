"""Prompts of exactly so many tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "prompts_train.jsonl"


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, steps: int, prompts: int, tokens: int
) -> list[list[str]]:
    """Different prompts of `tokens` tokens, cut out of the demo's: `prompts` for each of `steps`.

    Raises:
        ValueError: the source has not so many.
    """
    words = [
        word
        for line in SOURCE.read_text(encoding="utf-8").splitlines()
        for word in json.loads(line)["prompt"].split()
    ]
    texts = list(dict.fromkeys(_cut(tokenizer, words, steps * prompts, tokens)))
    if len(texts) < steps * prompts:
        raise ValueError(
            f"{SOURCE.name} has {len(texts)} different prompts of {tokens} tokens, expected {steps * prompts}; "
            "ask for fewer prompts or steps, or for other lengths"
        )
    return [texts[start : start + prompts] for start in range(0, len(texts), prompts)]


def _cut(
    tokenizer: PreTrainedTokenizerBase, words: list[str], count: int, tokens: int
) -> Iterator[str]:
    """Texts that are tokenised into exactly so many tokens, and come back unchanged; at most `count`."""
    start = 0
    while count and start < len(words):
        # A token is rarely more than a word, and a word rarely more than a few tokens.
        ids = tokenizer.encode(" ".join(words[start : start + tokens]), add_special_tokens=False)[
            :tokens
        ]
        text = str(tokenizer.decode(ids))
        if len(ids) == tokens and tokenizer.encode(text) == ids and text == text.strip():
            yield text
            count -= 1
            start += max(tokens // 2, 1)
        else:
            start += 1
