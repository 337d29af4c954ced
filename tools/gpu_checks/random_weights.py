"""The same random weights in both models, drawn on the device tensor by tensor."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.megatron.hf_weights import parameters_of
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_map import weight_map


def random_weight(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float32, the same for a name and a kind of device.

    The logits have a standard deviation of about 1.

    Args:
        name: Hugging Face's.
        shape: of the whole tensor.
        device: that draws, and has the result.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator, device=device)
    # The norms differ too, so that a swapped or forgotten tensor shows.
    return 1.0 + 0.1 * noise if len(shape) == 1 else noise / shape[1] ** 0.5


@torch.no_grad()
def fill_ours(lm: CausalLM) -> None:
    """Draw the weights of a model that is on one rank."""
    parameters = parameters_of(lm)
    for row in weight_map(lm.architecture, 1):
        weight = random_weight(row.hf, row.shape, lm.mesh.device)
        row.place(parameters[row.megatron], 0).copy_(row.like_place(weight))


@torch.no_grad()
def fill_transformers(model: Any, drawn_on: torch.device) -> None:
    """Draw the weights of a model of transformers.

    Args:
        model: on any device.
        drawn_on: the device that draws: each kind of device has its own generator.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(random_weight(name, tuple(parameter.shape), drawn_on))
