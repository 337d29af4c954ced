"""A model's Hugging Face folder: its `config.json`, and errors of other folders. Torch-free."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

from reinforce_rl.utils.untrusted_files import (
    MAX_CONFIG_BYTES,
    parse_yaml,
    read_bounded,
    read_model_json,
)

MODEL = "pretrained_checkpoint.restore_from_path"
ADAPTER_FILE = "adapter_config.json"
MERGE_ADAPTER = (
    "Merge it into its model (PEFT: merge_and_unload, then save_pretrained) and give that folder"
)


def model_values(folder: str) -> dict[str, Any]:
    """Return the content of a model's `config.json`; empty if unreadable, which the weights' rules
    report.
    """
    try:
        values = read_model_json(Path(folder) / "config.json")
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def no_model(path: str | Path) -> str:
    """Return what a path without a model's `config.json` is, and what to do, to be put after its
    name.
    """
    folder = Path(path)
    expected = "expected a Hugging Face model folder"
    if (folder / "hf" / "config.json").is_file():
        return f"is the folder of a run; did you mean {folder / 'hf'}?"
    if (folder / "checkpoints" / "latest").is_file():
        exported = folder / "hf"
        return f"is a run without an exported model, {exported}; write it: {export_command(folder)}"
    if (folder / "status.json").is_file():
        return (
            "is a run that ended before its first checkpoint, so it has no model; start its "
            "command again"
        )
    if (folder / ADAPTER_FILE).is_file():
        base = _adapter_base(folder)
        return (
            f"is an adapter of PEFT, made for the model {base}, and no model by itself. "
            f"{MERGE_ADAPTER}"
        )
    if folder.is_dir():
        return f"has no config.json that can be read; {expected}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not folder.parent.is_dir():
        download = f"hf download {path} --local-dir FOLDER"
        expected += f"; from the Hugging Face hub: `{download}`, then give FOLDER"
    return f"does not exist; {expected}"


def _adapter_base(folder: Path) -> str:
    try:
        values = read_model_json(folder / ADAPTER_FILE)
        return str(values["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"that {ADAPTER_FILE} should name"


def export_command(run: Path) -> str:
    """Return the command that exports a run's newest checkpoint."""
    base: Any = None
    with contextlib.suppress(OSError, ValueError):
        # The folder may be somebody else's: its values as they are, without what they would resolve
        # to.
        data = read_bounded(run / "config.yaml", max_bytes=MAX_CONFIG_BYTES)
        base = parse_yaml(data.decode("utf-8"))
        for key in MODEL.split("."):
            base = base[key] if isinstance(base, dict) and key in base else None
    base = base if isinstance(base, str) else "THE_MODEL_IT_BEGAN_FROM"
    return shlex.join(
        ["reinforce-rl", "convert", "to-hf", str(run), str(run / "hf"), "--model", base]
    )
