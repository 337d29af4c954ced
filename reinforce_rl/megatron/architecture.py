"""The shape of a Llama-family model, from a Hugging Face `config.json`, and its padding for tensor parallelism."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama",)


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder with RMSNorm, SwiGLU, RoPE and grouped-query attention.

    Attributes:
        vocab_size: true rows of the embedding, as in the checkpoint.
        tied_embeddings: the output layer shares the embedding's weight.
        max_positions: the longest sequence the model was made for, in tokens.
        raw: the whole Hugging Face config, kept for RoPE's scaling and for export.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn_size: int
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    raw: dict[str, Any]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Architecture:
        """Read `config.json` of a Hugging Face folder.

        Raises:
            ConfigError: no such folder or file, or an architecture that is not supported; all faults together.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError([f"{path} does not exist; expected a Hugging Face model folder with a config.json"])
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError([f"{path} is not valid JSON: {error}"]) from error
        return cls.from_hf(raw, source=str(path))

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str = "config") -> Architecture:
        """From the values of a Hugging Face config; see `from_folder`."""
        faults = []
        required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if raw.get("model_type") not in SUPPORTED_MODEL_TYPES:
            faults.append(
                f"{source}: model_type is {raw.get('model_type')!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        faults += [f"{source}: {key} is missing" for key in required if key not in raw]
        expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        faults += [
            f"{source}: {key} is {raw[key]!r}; only {value!r} is supported"
            for key, value in expected.items()
            if raw.get(key, value) != value
        ]
        heads, groups = raw.get("num_attention_heads", 1), raw.get("num_key_value_heads") or 1
        if heads % groups:
            faults.append(f"{source}: num_key_value_heads is {groups}, which does not divide {heads} attention heads")
        if not raw.get("head_dim") and raw.get("hidden_size", 0) % heads:
            faults.append(
                f"{source}: hidden_size is {raw['hidden_size']}, which {heads} attention heads do not divide, "
                "and head_dim is not given"
            )
        if faults:
            raise ConfigError(faults)
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_groups=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
            ffn_size=raw["intermediate_size"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied_embeddings=raw.get("tie_word_embeddings", False),
            max_positions=raw.get("max_position_embeddings", 2048),
            raw=raw,
        )

    def padded(self, tp_size: int) -> PaddedSizes:
        """Heads, groups and vocabulary rounded up so that `tp_size` ranks can share them.

        A padded group has zero query, key, value and output weights: it adds exactly 0 to the output and to every
        gradient, so SmolLM2's 9 heads in 3 groups run at TP=2 as 12 heads in 4 groups with unchanged numbers.
        Padded vocabulary rows are zero, and their logits are set to minus infinity.

        Raises:
            ConfigError: the feed-forward size does not divide.
        """
        if self.ffn_size % tp_size:
            raise ConfigError(
                [
                    f"model.tensor_model_parallel_size is {tp_size}, which does not divide "
                    f"the feed-forward size {self.ffn_size}"
                ]
            )
        groups = _round_up(self.num_groups, tp_size)
        return PaddedSizes(
            vocab_size=_round_up(self.vocab_size, tp_size),
            num_groups=groups,
            num_heads=groups * (self.num_heads // self.num_groups),
        )


@dataclass(frozen=True)
class PaddedSizes:
    """Sizes after padding for one tensor-parallel size; see `Architecture.padded`."""

    vocab_size: int
    num_groups: int
    num_heads: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
