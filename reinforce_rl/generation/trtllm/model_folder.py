"""The Hugging Face folder that an engine is started from: config and tokenizer, no weights."""

from __future__ import annotations

import json
from pathlib import Path

from reinforce_rl.megatron.architecture import with_old_rope_keys
from reinforce_rl.megatron.weights.hf_weights import carry_over


def write_engine_model(source: Path, out: Path) -> Path:
    """Copy what is no weight, with a config.json that transformers 4 reads as well, which TensorRT-LLM 1.2 uses."""
    out.mkdir(parents=True, exist_ok=True)
    carry_over(source, out)
    config = out / "config.json"
    values = with_old_rope_keys(json.loads(config.read_text(encoding="utf-8")))
    if "dtype" in values:
        values.setdefault("torch_dtype", values["dtype"])
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return out
