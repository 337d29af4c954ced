"""Convert a YAML of NeMo-Aligner's REINFORCE actor.

The new file begins with comments on what was left out, and why.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from reinforce_rl.config.compose import compose
from reinforce_rl.config.load import advice_for, read_config
from reinforce_rl.config.nemo_keys import RENAMED
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.launch.nemo_file import read_nemo_file
from reinforce_rl.utils.control_characters import show_control_characters
from reinforce_rl.utils.files import write_atomically

PROGRAM = "train_reinforce_actor"
PRESET = "nemo_aligner"
_GONE = "there is nothing to choose"
# Keys of the same name whose values have another meaning.
_LEFT_OUT = {
    "pretrained_checkpoint.restore_from_path": (
        "set it to a folder in Hugging Face format in place of the .nemo file"
    ),
    "remote_rm.pad_to_length": "padding changes no score and costs time",
    "model.global_batch_size": (
        "null here, one optimizer step a rollout batch: smaller ones need an importance_ratio"
    ),
    "model.reinforce.num_val_samples": "null here, the whole validation set",
    "model.reinforce.length_params.min_length": (
        "above 0 it biases the gradient; an empty response does not count"
    ),
} | dict.fromkeys(("trainer.max_epochs", "trainer.max_steps", "model.data.num_workers"), _GONE)
# Counterparts of values, for keys with other choices. A value that is not here has none.
_VALUES = {
    "trainer.precision": {"bf16": "bf16", "bf16-mixed": "bf16", "32": "32"},
    "model.peft.peft_scheme": {"lora": "lora", "none": None},
    "model.optim.name": {
        "distributed_fused_adam": "adam",
        "fused_adam": "adam",
        "adamw": "adam",
        "adam": "adam",
    },
    "model.optim.sched.name": {"CosineAnnealing": "CosineAnnealing", "WarmupPolicy": "constant"},
}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_PROJECTIONS = {
    "attention": _ATTENTION,
    "attention_qkv": _ATTENTION[:3],
    "attention_dense": _ATTENTION[3:],
}
_PROJECTIONS |= {"mlp": _MLP, "mlp_fc1": _MLP[:2], "mlp_fc2": _MLP[2:]}
_UNBIASED = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def convert_file(path: Path, out: Path | None) -> None:
    """Write the new file, or print it; ConfigError if `out` exists."""
    if out is None:
        print(converted(path), end="")
        return
    if out.exists():
        raise ConfigError(
            [Fault(f"{out} exists; expected the name of a new file", key="nemo.output.exists")]
        )
    write_atomically(out, converted(path))
    print(f"written to {out}; keys without a counterpart are listed at its head. Start it with")
    print(f"reinforce-rl train --config-dir {out.absolute().parent} --config-name {out.stem}")


def converted(path: str | Path) -> str:
    """Return the YAML of a run of this package.

    Raises ConfigError if the file cannot be read or belongs to another program.
    """
    cfg, unresolved = read_nemo_file(Path(path))
    given = dict(_leaves(cfg))
    if not any(key.startswith(("trainer.reinforce.", "model.reinforce.")) for key in given):
        expected = "expected the format of NeMo-Aligner's gpt_reinforce_actor.yaml"
        sentence = f"{path} has neither trainer.reinforce nor model.reinforce; {expected}"
        raise ConfigError([Fault(sentence, key="nemo.file.other_program")])
    base = compose(PROGRAM, [f"algorithm={PRESET}"])
    known = dict(_leaves(base))
    keys: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for key, why in unresolved.items():
        left_out.setdefault(why, []).append(key)
    for key, value in given.items():
        name = RENAMED.get(key, key)
        if value is None or (name != key and name in keys):  # explicit_log_dir goes before exp_dir
            continue
        if why := _reason(key, value, given) or ("" if name in known else _unknown(key, value)):
            left_out.setdefault(why, []).append(key)
        else:
            keys[name] = _value(name, value)
    sampling = "model.reinforce.sampling_params."
    if any(keys.get(sampling + name, value) != value for name, value in _UNBIASED.items()):
        keys["model.reinforce.allow_biased_sampling"] = True
    new = OmegaConf.create()
    for key, value in keys.items():
        OmegaConf.update(new, key, value, force_add=True)
    faults = read_config(OmegaConf.merge(base, new))[1]  # type: ignore[arg-type]

    notes = ["Converted from NeMo-Aligner's format. Keys that are not below have their defaults."]
    notes += ["To be set or mended:", *(f"- {fault}" for fault in faults)] if faults else []
    notes += ["Left out:", *(f"- {', '.join(names)}: {why}" for why, names in left_out.items())]
    wrap = functools.partial(
        textwrap.fill, width=119, initial_indent="# ", subsequent_indent="#   "
    )
    # A line separator from the file would end the comment.
    shown = map(show_control_characters, notes)
    head = "\n".join(wrap(note, break_long_words=False, break_on_hyphens=False) for note in shown)
    defaults = [PROGRAM, {"override algorithm": PRESET}, "_self_"]
    defaults_list = yaml.safe_dump({"defaults": defaults}, sort_keys=False)
    return f"{head}\n\n{defaults_list}\n{OmegaConf.to_yaml(new)}"


def _leaves(node: DictConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values; None for a missing value."""
    for name in (name for name in node if path or name not in ("defaults", "hydra")):
        key = f"{path}{name}"
        value = None if OmegaConf.is_missing(node, name) else node[name]
        if isinstance(value, DictConfig) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield (
                key,
                OmegaConf.to_container(value)
                if isinstance(value, DictConfig | ListConfig)
                else value,
            )


def _reason(key: str, value: Any, given: dict[str, Any]) -> str:
    """Return why a key or its value has no counterpart; empty if it has a counterpart."""
    if key.startswith("model.peft.lora_tuning.") and given.get("model.peft.peft_scheme") != "lora":
        return _GONE
    if key in _VALUES and str(value) not in _VALUES[key]:
        return f"there is no {value} here; known: {', '.join(_VALUES[key])}"
    return _LEFT_OUT.get(key, "")


def _unknown(key: str, value: Any) -> str:
    if advice := advice_for(key, value=value):
        return advice.removeprefix("leave it out: ")
    override = "; a field of megatron-core's TransformerConfig is +model.megatron_overrides.NAME"
    return "no such key here" + (override if key.startswith("model.") else "")


def _value(name: str, value: Any) -> Any:
    if name.endswith(".target_modules"):
        modules = [value] if isinstance(value, str) else value
        return list(
            dict.fromkeys(ours for theirs in modules for ours in _PROJECTIONS.get(theirs, [theirs]))
        )
    if name.endswith(".best_metric"):
        return str(value).replace("val_", "val/", 1)
    return _VALUES[name][str(value)] if name in _VALUES else value
