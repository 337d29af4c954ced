"""The weights with which vLLM computes on a CPU; wrong weights are detected.

`make test-engine` runs these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.altered_vllm import NAMED, alter
from helpers.errors import raises_error
from helpers.models import tiny_family_folder
from helpers.policies import transformers_logits, transformers_model
from helpers.vllm_engine import (
    SMALL_BUCKET,
    TOLERANCE,
    change_weights,
    draw,
    generator_of,
    log_prob_gap,
    vllm_model,
    vllm_overrides,
)

from reinforce_rl.megatron.hf_weights import export_hf_folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
QUICK = ("output layer lost",)  # the other faults are slow: each starts an engine


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in NAMED],
)
def test_an_engine_that_computes_with_other_weights_is_refused_by_name(tmp_path, mesh, kind):
    """Proves that the check of an update can fail."""
    vllm_model(tmp_path, tied=kind == "output layer lost")
    _, generator = generator_of(tmp_path, mesh, *vllm_overrides())
    alter(generator, kind)
    generator._was_restarted = True  # otherwise it would be tried again
    values = ("with the weights that it was given; ", NAMED[kind])
    with raises_error("generation.engine.failed_again", *values):
        draw(generator)
    generator.close()


# Each family, tied and untied output layers, both precisions; other combinations are slow.
OF_EACH = [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", True)]
FAMILIES = [
    pytest.param(
        family,
        tied,
        dtype,
        id=f"{family}-{'tied' if tied else 'untied'}-{str(dtype)[6:]}",
        marks=[] if (family, tied) in OF_EACH or dtype == torch.bfloat16 else [pytest.mark.slow],
    )
    for family, tied, dtype in [
        *(
            (family, tied, torch.float32)
            for family in ("llama", "mistral", "qwen2", "qwen3")
            for tied in (True, False)
        ),
        ("qwen2", True, torch.bfloat16),
    ]
]


@pytest.mark.parametrize(("family", "tied", "dtype"), FAMILIES)
def test_log_probs_equal_transformers(tmp_path, mesh, family, tied, dtype):
    """Before and after an update, with weights in many buckets and transformers' names."""
    keys: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 61,
    }
    # By transformers' default only Mistral has a window.
    keys |= (
        {"sliding_window": None}
        if family == "mistral"
        else {"head_dim": 64}
        if family == "qwen3"
        else {}
    )
    folder = tiny_family_folder(tmp_path / "model", family, tie_word_embeddings=tied, **keys)
    precision = "bf16" if dtype == torch.bfloat16 else "32"
    overrides = (*vllm_overrides(), f"trainer.precision={precision}")
    lm, generator = generator_of(tmp_path, mesh, *overrides)
    generator._bucket_bytes = SMALL_BUCKET
    gaps = []
    for update in range(2):
        completions = draw(generator)
        exported = export_hf_folder(lm, folder, tmp_path / f"exported_{update}")
        logits_of = partial(transformers_logits, transformers_model(exported))
        gaps.append(log_prob_gap(logits_of, completions))
        assert gaps[-1] < (TOLERANCE if dtype == torch.float32 else 0.1)
        change_weights(lm)
    first_logits_of = partial(transformers_logits, transformers_model(tmp_path / "exported_0"))
    assert gaps[-1] < log_prob_gap(first_logits_of, completions) / 2
    generator.close()
