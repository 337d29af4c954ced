"""Weights on their way to an engine: another process reads this one's GPU memory by CUDA IPC.

As the workers' extensions for TensorRT-LLM and vLLM read them.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import torch

from gpu_checks.base import Context, Finding, judged
from gpu_checks.random_weights import fill_ours
from gpu_checks.shapes import SHAPES
from reinforce_rl.config.engines import TensorRTLLMConfig, VLLMConfig
from reinforce_rl.generation.engine.process import EngineAdapter
from reinforce_rl.generation.engine.weights import send_weights
from reinforce_rl.generation.trtllm.adapter import TensorRTLLM
from reinforce_rl.generation.vllm.adapter import VLLM
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import hf_tensors
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.utils.process import PACKAGE_PARENT

BUCKET_BYTES = 1 << 17  # the tiny model has more, so that a bucket's memory is filled several times

# One line a bucket; answered by one line of JSON: dtype, shape and sum of each tensor.
RECEIVER = """
import base64, json, pickle, sys
import torch
from reinforce_rl.generation.engine import buckets

for line in sys.stdin:
    found, bucket = {}, pickle.loads(base64.b64decode(line))
    (place,) = bucket["places"]
    for name, tensor in buckets.received(bucket, place, torch.device("cuda", 0)):
        found[name] = [str(tensor.dtype), list(tensor.shape), float(tensor.double().sum())]
        del tensor
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
    print(json.dumps(found), flush=True)
"""


def check(context: Context) -> Finding:
    with parallel_mesh() as mesh:
        lm = CausalLM(Architecture.from_hf(SHAPES["tiny"]), mesh, torch.bfloat16)
        fill_ours(lm)
        expected = {
            name: summary(value)
            for name, value in hf_tensors(lm, device=mesh.device)
            if value is not None
        }
        faults = []
        buckets = 0
        for adapter in (TensorRTLLM(TensorRTLLMConfig()), VLLM(VLLMConfig())):
            received, buckets = exchange(lm, adapter)
            faults += [f"{adapter.title}: {fault}" for fault in differences(received, expected)]
    return judged(
        faults, f"{len(expected)} tensors in {buckets} buckets arrived, twice", {"buckets": buckets}
    )


def summary(tensor: torch.Tensor) -> list[Any]:
    """dtype, shape and sum."""
    return [str(tensor.dtype), list(tensor.shape), float(tensor.double().sum())]


def differences(received: dict[str, list[Any]], expected: dict[str, list[Any]]) -> list[str]:
    """What is missing, and what is not what it was. Sums may differ by their order."""
    faults = [f"{name} did not arrive" for name in expected if name not in received]
    for name, (dtype, shape, total) in received.items():
        right = expected.get(name)
        if (
            right is None
            or [dtype, shape] != right[:2]
            or not abs(total - right[2]) <= 1e-9 * (1 + abs(right[2]))
        ):
            faults.append(f"{name} arrived as {[dtype, shape, total]}, expected {right}")
    return faults[:5]


def exchange(lm: CausalLM, adapter: EngineAdapter) -> tuple[dict[str, list[Any]], int]:
    """Send all weights to a new process; return what it read, and the number of buckets."""
    command = [sys.executable, "-c", RECEIVER]
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
    receiver = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment,
        encoding="utf-8",
        errors="replace",
    )
    stdin = receiver.stdin
    stdout = receiver.stdout
    assert stdin is not None and stdout is not None
    received: dict[str, list[Any]] = {}
    buckets = 0

    def deliver(offers: list[Any]) -> None:
        nonlocal buckets
        stdin.write(base64.b64encode(pickle.dumps(adapter.bucket_of(offers))).decode() + "\n")
        answer = stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the receiving process ended with exit code {receiver.wait(timeout=10)}"
            )
        received.update(json.loads(answer))
        buckets += 1

    try:
        send_weights(
            lm,
            deliver,
            max_bytes=BUCKET_BYTES,
            make_buffer=lambda elements, dtype: adapter.make_buffer(
                elements, dtype, lm.mesh.device
            ),
            hosts_worker=True,
            is_spread=False,
        )
    finally:
        receiver.kill()
        receiver.communicate(timeout=30)
    return received, buckets
