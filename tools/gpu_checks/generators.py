"""Weights on their way to generators: broadcast by NCCL, received on a stream of its own while the device is busy.

NCCL refuses two ranks on one GPU, so the group has one rank, and a second model takes what has passed through it.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_checks.base import Context, Finding, judged
from gpu_checks.random_weights import fill_ours
from gpu_checks.shapes import SHAPES
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.rollout.weight_group import ElasticWeightGroup
from reinforce_rl.rollout.weights import load_weights, receive_weights, send_weights
from reinforce_rl.utils.net import LOOPBACK

BUCKET_BYTES = 1 << 15  # the tiny model has more, so that both buffers are filled several times


class Recorded:
    """A group of one rank; what was broadcast is kept, and then given to who receives."""

    def __init__(self, group: ElasticWeightGroup):
        self.sent: deque[Tensor] = deque()
        self.receives = False
        self._group = group

    def broadcast(self, tensor: Tensor) -> Any:
        if self.receives:
            return SimpleNamespace(wait=lambda: tensor.copy_(self.sent.popleft()))
        work = self._group.broadcast(tensor)

        def wait() -> None:
            work.wait()
            self.sent.append(tensor.clone())

        return SimpleNamespace(wait=wait)


def check(context: Context) -> Finding:
    with parallel_mesh() as mesh:
        architecture = Architecture.from_hf(SHAPES["tiny"])
        trained, other = (CausalLM(architecture, mesh, torch.bfloat16) for _ in range(2))
        fill_ours(trained)
        store = dist.HashStore()  # type: ignore[attr-defined]
        group = ElasticWeightGroup(store, LOOPBACK, mesh.device, timedelta(seconds=60))
        group.form(epoch=1, rank=0, size=1)
        wire: Any = Recorded(group)
        sent = send_weights(trained, wire, BUCKET_BYTES)
        buckets = len(wire.sent)
        wire.receives = True
        received: list[dict[str, Tensor]] = []
        receiver = threading.Thread(
            target=lambda: received.append(receive_weights(other, wire, BUCKET_BYTES))
        )
        receiver.start()
        busy = torch.ones(512, 512, device=mesh.device)
        while receiver.is_alive():
            busy = busy @ busy / 512
        receiver.join()
        faults = [] if received else ["nothing was received; see the log"]
        if received:
            load_weights(other, received[0])
            pairs = zip(trained.named_parameters(), other.parameters(), strict=True)
            faults = [
                f"{name} arrived otherwise"
                for (name, sent_tensor), theirs in pairs
                if not torch.equal(sent_tensor, theirs)
            ][:5]
    return judged(faults, f"{sent / 1e6:.1f} MB in {buckets} buckets", {"buckets": buckets})
