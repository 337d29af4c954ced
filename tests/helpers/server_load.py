"""Concurrent clients of a real reward server, and a multi-rank server with killable ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from helpers.models import tiny_llama_folder
from helpers.real_run import RealServer
from helpers.rewards import request_of

from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.scorer import Batching, load_reward_model
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rewards.client import RemoteGPTRMClient

VOCAB_SIZE = 64
CLIENTS = 64


@dataclass(frozen=True)
class ModelFiles:
    """A trunk, and a head in `folder`."""

    folder: Path
    trunk: Path

    @classmethod
    def make(cls, folder: Path) -> ModelFiles:
        """Create small random files."""
        files = cls(folder, tiny_llama_folder(folder / "trunk", vocab_size=VOCAB_SIZE, seed=1))
        weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
        RewardHead(weight, torch.tensor(0.5), "mean").save(files.head)
        return files

    @property
    def head(self) -> Path:
        return self.folder / "head.safetensors"

    @property
    def overrides(self) -> list[str]:
        return [
            f"reward_model.restore_from_path={self.trunk}",
            f"reward_model.head_path={self.head}",
        ]

    def scores(self, mesh: Mesh, requests: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """Score each request by direct forward passes, one sequence at a time."""
        model = load_reward_model(
            self.trunk, self.head, mesh, batching=Batching(micro_batch_size=1)
        )
        return [model.score(list(request)) for request in requests]


class RankedServer(RealServer):
    """A process of examples/serve_reward_model.py under torchrun, and its ranks."""

    start_seconds = 240.0

    def ranks(self) -> list[psutil.Process]:
        """Return the processes, rank 0 first."""
        ranks = [
            p
            for p in psutil.Process(self.process.pid).children()
            if "serve_reward_model.py" in str(p.cmdline())
        ]
        return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))

    def close(self) -> None:
        if self.process.poll() is None:
            for rank in self.ranks():  # not their guards, which clean up after them
                rank.kill()
            self.process.kill()
            self.process.wait()
        super().close()


def mixed_requests(count: int, longest: int = 60, most: int = 8) -> list[list[list[int]]]:
    """Return requests of 1 to `most` sequences of 1 to `longest` tokens."""
    rng = np.random.default_rng(count)
    return [
        [
            rng.integers(3, VOCAB_SIZE, length).tolist()
            for length in rng.integers(1, longest + 1, size)
        ]
        for size in rng.integers(1, most + 1, count)
    ]


def score_all(
    port: int,
    requests: Sequence[Sequence[list[int]]],
    *,
    clients: int,
    seconds: float,
    on_answer: Callable[[], object] = lambda: None,
) -> list[Rewards]:
    """Score all requests with `clients` concurrent clients; return the answers in order."""

    def ask_for(client: RemoteGPTRMClient, request: Sequence[list[int]]) -> Rewards:
        answer = client.infer_rm(request_of(request)).result()
        on_answer()
        return answer

    def ask(first: int) -> list[Rewards]:
        client = RemoteGPTRMClient(
            port=port,
            deadline_seconds=seconds,
            max_in_flight=1,
            max_backoff_seconds=2.0,
            on_wait=lambda _: None,
        )
        try:
            return [ask_for(client, request) for request in requests[first::clients]]
        finally:
            client.close()

    with ThreadPoolExecutor(clients) as pool:
        shares = list(pool.map(ask, range(clients)))
    return [shares[index % clients][index // clients] for index in range(len(requests))]


def check_scores(
    answers: Sequence[Rewards], expected: Sequence[Sequence[float]], tolerance: float = 1e-4
) -> None:
    """Assert that every sample has its score."""
    assert len(answers) == len(expected)
    for answer, scores in zip(answers, expected, strict=True):
        assert answer.status.tolist() == [0] * len(scores)
        np.testing.assert_allclose(answer.values.numpy(), scores, atol=tolerance)
