"""Weights from trainers to generators on GPUs stay on the device and arrive bit for bit."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.lora import EVERY, lora_model
from helpers.policies import megatron_model
from torch import Tensor

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.rollout.weights import load_weights, receive_weights, send_weights

BF16 = torch.bfloat16
BUCKET_BYTES = 4096  # no buffer is larger than tensors with known values


class Wire:
    """A weight group; the other rank receives the first rank's broadcasts later, in order."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.receives = False

    def broadcast(self, tensor: Tensor) -> Any:
        assert tensor.is_cuda
        assert tensor.dtype == BF16
        assert tensor.is_contiguous()
        if self.receives:
            tensor.copy_(self.sent.popleft())
        else:
            self.sent.append(tensor.clone())
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("lora", [False, True], ids=["whole model", "LoRA"])
def test_weights_arrive_on_the_device(machine, folders, lora):
    def model(mesh):
        return (
            lora_model(folders[2], mesh, EVERY, BF16)
            if lora
            else megatron_model(folders[2], mesh, BF16)
        )

    with machine.rank(), parallel_mesh() as mesh:
        trained = model(mesh)
        other = model(mesh)
        wire = Wire()
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(2 if parameter.requires_grad else 1)
        sent = send_weights(trained, wire, BUCKET_BYTES)  # type: ignore[arg-type]
        assert len(wire.sent) > (0 if lora else 2)
        assert sent == sum(tensor.nbytes for tensor in wire.sent)
        wire.receives = True
        received = receive_weights(other, wire, BUCKET_BYTES)  # type: ignore[arg-type]
        assert not wire.sent
        for tensor in received.values():
            assert tensor.is_cuda
        assert all("lora" in name for name in received) == lora
        load_weights(other, received)
        for (name, weight), expected in zip(
            other.named_parameters(), trained.parameters(), strict=True
        ):
            assert torch.equal(weight.cpu(), expected.cpu()), name
