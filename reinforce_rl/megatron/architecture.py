"""Sizes of a dense decoder from a Hugging Face `config.json`, and their padding for TP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reinforce_rl.config.model_folder import no_model
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.untrusted_files import UnreadableFileError, read_model_json

_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


@dataclass(frozen=True)
class _Family:
    """Differences of a family from a decoder with RMSNorm, SwiGLU, RoPE and no biases."""

    defaults: dict[str, Any]  # transformers' values for keys missing in config.json
    # Key `attention_bias` adds biases to q, k, v and the output projection.
    has_attention_bias_key: bool = False
    qkv_bias: bool = False  # q, k and v always have biases
    qk_norm: bool = False  # RMSNorm over each head's query and key
    # Layers with `sliding_window`; None: the key is not read.
    windows: Literal["all", "layer_types"] | None = None


# The supported families by `model_type`. To add a family, add a row; see CONTRIBUTING.md.
_FAMILIES = {
    "llama": _Family({"max_position_embeddings": 2048}, has_attention_bias_key=True),
    "mistral": _Family(
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": _Family(_QWEN, qkv_bias=True, windows="layer_types"),
    "qwen3": _Family(
        {**_QWEN, "head_dim": 128}, has_attention_bias_key=True, qk_norm=True, windows="layer_types"
    ),
}

# Further keys that change the computation of these families, with the values without an effect.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "mlp_bias": (False, None),
    "num_experts": (0, 1, None),
    "num_local_experts": (0, 1, None),
    "dual_chunk_attention_config": (None,),
    "partial_rotary_factor": (1, None),
}
# Keys of quantised folders, with inner keys that name the method; `quantization` is MLX's.
_QUANTISED = {
    "quantization_config": ("quant_method", "quant_algo"),
    "compression_config": ("quant_method", "format"),
    "quantization": ("mode",),
}
UNQUANTISED = "use the folder of the unquantised model"
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_COUNTS = (*_REQUIRED, "max_position_embeddings")
# Bounds, as transformers makes lists with these lengths.
_MOST = {"num_hidden_layers": 1000, "num_labels": 10_000}
# transformers and engines may read one of the files that this key names in place of config.json.
_OTHER_FILES = "configuration_files"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder with RMSNorm, SwiGLU, RoPE and grouped-query attention."""

    vocab_size: int  # embedding rows, without padding
    hidden_size: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn_size: int
    norm_eps: float
    tied_embeddings: bool  # the output layer shares the embedding's weight
    max_positions: int  # in tokens
    qkv_bias: bool
    output_bias: bool  # on attention's output projection
    qk_norm: bool  # RMSNorm over each head's query and key, with one weight for all heads
    window: int | None  # tokens that a position attends to, itself included; None for all
    raw: dict[str, Any]  # the whole Hugging Face config, kept for RoPE's scaling and for export
    num_labels: int | None = None  # scores of a classifier; None for a language model

    @classmethod
    def from_folder(cls, folder: str | Path) -> Architecture:
        """Read `config.json` of a Hugging Face folder. Raises ConfigError with all faults."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError([Fault(f"{folder} {no_model(folder)}", key="model.folder.no_model")])
        try:
            raw = read_model_json(path)
        except UnreadableFileError as error:
            raise ConfigError([Fault(str(error), key=error.key)]) from error
        except (OSError, ValueError) as error:
            sentence = f"{path} is not valid JSON: {error}"
            raise ConfigError([Fault(sentence, key="model.config.not_json")]) from error
        if not isinstance(raw, dict):
            expected = "expected an object, the config.json of a Hugging Face model"
            sentence = f"{path} is a JSON {type(raw).__name__}; {expected}"
            raise ConfigError([Fault(sentence, key="model.config.no_object")])
        return cls.from_hf(raw, source=str(path))

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str = "config") -> Architecture:
        """Read the values of a Hugging Face config, like `from_folder`."""
        family = _FAMILIES.get(str(raw.get("model_type")), _Family({}))
        values = {**family.defaults, **raw}
        faults = _faults(values, family)
        if faults:
            raise ConfigError([Fault(f"{source}: {fault}", key=fault.key) for fault in faults])
        heads = values["num_attention_heads"]
        attention_bias = family.has_attention_bias_key and bool(values.get("attention_bias"))
        return cls(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_groups=values.get("num_key_value_heads") or heads,
            head_size=values.get("head_dim") or values["hidden_size"] // heads,
            ffn_size=values["intermediate_size"],
            norm_eps=values.get("rms_norm_eps", 1e-6),
            tied_embeddings=values.get("tie_word_embeddings", False),
            max_positions=values["max_position_embeddings"],
            qkv_bias=attention_bias or family.qkv_bias,
            output_bias=attention_bias,
            qk_norm=family.qk_norm,
            window=_windows(values, family).pop(),
            raw=raw,
        )

    def as_classifier(self, num_labels: int) -> Architecture:
        """Return the same decoder with `num_labels` scores in place of the output layer."""
        return replace(self, num_labels=num_labels, tied_embeddings=False)

    def padded(self, tp_size: int) -> PaddedSizes:
        """Round heads, groups and vocabulary up to multiples that `tp_size` ranks can share.

        `ffn_size` must be such a multiple, else ConfigError. Padded groups have zero weights and
        biases, so outputs and gradients are exact: SmolLM2's 9 heads in 3 groups run at TP=2 as 12
        heads in 4 groups. Padded vocabulary rows are zero, with logits at -inf.
        """
        if self.ffn_size % tp_size:
            sentence = (
                f"model.tensor_model_parallel_size is {tp_size}, which does not divide "
                f"the feed-forward size {self.ffn_size}"
            )
            fault = Fault(
                sentence,
                key="config.tensor_model_parallel_size.not_a_divisor_of_feed_forward",
            )
            raise ConfigError([fault])
        groups = _round_up(self.num_groups, tp_size)
        return PaddedSizes(
            _round_up(self.vocab_size, tp_size),
            groups,
            groups * (self.num_heads // self.num_groups),
        )


class PaddedSizes(NamedTuple):
    """Sizes for one tensor-parallel size; see `Architecture.padded`."""

    vocab_size: int
    num_groups: int
    num_heads: int


def _faults(values: dict[str, Any], family: _Family) -> list[Fault]:
    faults: list[Fault] = []
    if (model_type := values.get("model_type")) not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        sentence = f"model_type is {model_type!r}; supported: {supported} (dense decoders)"
        faults.append(Fault(sentence, key="model.config.other_model_type"))
    for key in _REQUIRED:
        if key not in values:
            faults.append(Fault(f"{key} is missing", key="model.config.missing"))
    wrong = [key for key in _COUNTS if key in values and not _is_count(values[key])]
    optional = ("num_key_value_heads", "head_dim", "num_labels")
    wrong += [key for key in optional if not _is_count(values.get(key) or 1)]
    for key in wrong:
        sentence = f"{key} is {values[key]!r}; expected a whole number of at least 1"
        faults.append(Fault(sentence, key="model.config.no_count"))
    for key, most in _MOST.items():
        count = values.get(key)
        if isinstance(count, int) and count > most:
            sentence = f"{key} is {count}; expected at most {most}"
            faults.append(Fault(sentence, key="model.config.too_large"))
            wrong.append(key)
    faults += _other_files(values)
    faults += _quantisation_faults(values)
    rope = _rope_of(values)
    if rope is None:
        given = values.get("rope_scaling") or values["rope_parameters"]
        sentence = f"rope_scaling or rope_parameters is {given!r}; expected an object"
        faults.append(Fault(sentence, key="model.config.rope_no_object"))
        rope = {}
    effective = {
        **values,
        "partial_rotary_factor": rope.get(
            "partial_rotary_factor", values.get("partial_rotary_factor")
        ),
    }
    for key, allowed in _WITHOUT_EFFECT.items():
        if key in effective and effective[key] not in allowed:
            sentence = f"{key} is {effective[key]!r}; only {allowed[0]!r} is supported"
            faults.append(Fault(sentence, key="model.config.not_supported"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        sentence = f"rope_type is {kind!r}; supported: {', '.join(_ROPE_TYPES)}"
        faults.append(Fault(sentence, key="model.config.other_rope_type"))
    if wrong:
        return faults  # the checks below compute with these values
    heads = values.get("num_attention_heads", 1)
    groups = values.get("num_key_value_heads") or heads
    if heads % groups:
        sentence = f"num_key_value_heads is {groups}, which does not divide {heads} attention heads"
        faults.append(Fault(sentence, key="model.config.groups_no_divisor_of_heads"))
    if not values.get("head_dim") and (hidden := values.get("hidden_size", 0)) % heads:
        sentence = (
            f"hidden_size is {hidden}, which is not a multiple of {heads} attention heads, and "
            "head_dim is missing; expected a multiple, or a head_dim"
        )
        faults.append(Fault(sentence, key="model.config.heads_no_divisor_of_hidden"))
    head_size = values.get("head_dim") or values.get("hidden_size", 0) // heads
    if head_size % 2:
        sentence = (
            f"the size of a head (head_dim, or hidden_size by heads) is {head_size}; "
            "expected an even number, as rotary embeddings rotate pairs"
        )
        faults.append(Fault(sentence, key="model.config.odd_head_size"))
    if len(_windows(values, family)) > 1:
        sentence = (
            f"sliding_window is {values['sliding_window']} on some layers only "
            "(use_sliding_window, with max_window_layers or layer_types); "
            "supported: on all layers or on none"
        )
        faults.append(Fault(sentence, key="model.config.window_on_some_layers"))
    return faults


def _other_files(values: dict[str, Any]) -> list[Fault]:
    names = values.get(_OTHER_FILES) or []
    others = (
        [str(name) for name in names if name != "config.json"]
        if isinstance(names, list)
        else [str(names)]
    )
    if not others:
        return []
    sentence = (
        f"{_OTHER_FILES} names {others[0]}, which transformers may read in place of config.json; "
        "remove this key, or replace config.json by that file"
    )
    return [Fault(sentence, key="model.config.other_file")]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1  # true is an int too


def _rope_of(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return RoPE's settings; None if they are not an object.

    transformers uses the older key if both exist.
    """
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return rope if isinstance(rope, dict) else None


def _quantisation_faults(values: dict[str, Any]) -> list[Fault]:
    faults: list[Fault] = []
    for key, names in _QUANTISED.items():
        settings = values.get(key)
        if not settings:
            continue
        known = settings if isinstance(settings, dict) else {}
        method = next((str(known[name]) for name in names if known.get(name)), None)
        if method is None and (known.get("load_in_4bit") or known.get("load_in_8bit")):
            method = "bitsandbytes"
        by = f"with {method} ({key})" if method else f"({key})"
        sentence = (
            f"the weights are quantised {by}, and training needs them unquantised; {UNQUANTISED}"
        )
        faults.append(Fault(sentence, key="model.weights.quantised"))
        break  # some folders have two of the keys
    return faults


def _windows(values: dict[str, Any], family: _Family) -> set[int | None]:
    """Return the windows of the layers.

    None stands for no window, or a window as long as the longest sequence.
    """
    window = values.get("sliding_window")
    if window is None or window >= values.get("max_position_embeddings", 0):
        return {None}
    if family.windows == "all":
        return {window}
    if family.windows is None or not values["use_sliding_window"]:
        return {None}
    kinds = values.get("layer_types") or [
        "full_attention" if layer < values["max_window_layers"] else "sliding_attention"
        for layer in range(values.get("num_hidden_layers", 0))
    ]
    return {window if kind == "sliding_attention" else None for kind in kinds}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def with_old_rope_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Add RoPE's keys for transformers 4, which silently ignores `rope_parameters` of version 5."""
    rope = values.get("rope_parameters")
    if not rope or values.get("rope_scaling"):  # version 5 uses the older key if both exist
        return values
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return {
        **values,
        **theta,
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
    }
