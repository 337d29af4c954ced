"""The reward function of both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vowels(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """The share of vowels among the response's characters, 0 for an empty response."""
    return sum(character in "aeiouAEIOU" for character in response) / max(len(response), 1)
