"""The random state of a rank. Sampling does not use it: its noise is keyed; see `generation/native/sampling.py`."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from reinforce_rl.megatron.mesh import Mesh


def random_state(mesh: Mesh) -> dict[str, Any]:
    """Of Python, NumPy, torch, this rank's GPU and megatron's tracker, in types that `torch.load` trusts."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    tracker: Any = get_cuda_rng_tracker()
    state = {
        "layout": _layout(mesh),
        "torch": torch.get_rng_state(),
        "python": json.dumps(random.getstate()),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "megatron": dict(tracker.get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], mesh: Mesh) -> None:
    """Inverse of `random_state`. A state of another layout means nothing here, and is left out."""
    if state["layout"] != _layout(mesh):
        return
    torch.set_rng_state(state["torch"])
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _layout(mesh: Mesh) -> dict[str, int]:
    sizes = {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "context": mesh.cp_size}
    return {"world_size": mesh.world_size, **sizes}
