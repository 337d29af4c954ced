"""The fake's model: the native engine, with weights of a folder and noise from request seeds."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from helpers.weight_updates import PlannedUpdates
from safetensors.torch import save_file

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import PartialResponse, SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import load_hf_weights
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM


class NativeModel:
    def __init__(self, folder: str):
        self._folder = Path(folder)
        self._open = contextlib.ExitStack()  # keeps the process groups open
        mesh = self._open.enter_context(parallel_mesh())
        self._lm = CausalLM(Architecture.from_folder(folder), mesh, torch.float32)
        self._engine = NativeGenerator(self._lm, load_tokenizer(folder))

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Load the weights; raise for missing, unknown or misshapen weights."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self._folder / "config.json", folder)
            save_file(weights, Path(folder) / "model.safetensors")
            load_hf_weights(self._lm, HFFolder(folder))

    def complete(self, tokens: list[int], asked: Any) -> tuple[list[int], list[float], str]:
        greedy = asked.temperature is None and asked.top_k is None and asked.top_p is None
        params = SamplingParams(
            max_length=asked.max_tokens,
            temperature=1.0 if greedy else asked.temperature,
            top_k=asked.top_k or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            use_greedy=greedy,
            stop_token_ids=tuple(asked.stop_token_ids),
        )
        asked_for = PartialResponse(Prompt(0, "", tuple(tokens)), asked.seed)
        (response,) = self._engine.resume([asked_for], params, PlannedUpdates())
        assert response.finish_reason is not None
        return list(response.tokens), list(response.log_probs), response.finish_reason
