"""The real server under load, with one rank and with several, and a rank that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers.errors import check_fault
from helpers.http_call import call
from helpers.models import smollm2_folder
from helpers.real_run import RealServer
from helpers.reward_model_files import VOCAB_SIZE, ModelFiles
from helpers.rewards import request_of
from helpers.toy_server import ToyServer, is_alive, wait_for
from omegaconf import OmegaConf

from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.load import read_config
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.errors import EXIT_FINISHED, EXIT_LOST_RANK
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.transport import FailedAttempt

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

# on a busy machine; each wait has its own deadline
pytestmark = pytest.mark.timeout(1500)

CLIENTS = 64
QUICK_REQUESTS = 300
LOAD_SECONDS = 240.0
SMOLLM2_SECONDS = 900.0
TENSOR_PARALLEL = ["devices=2", "reward_model.tensor_model_parallel_size=2"]
DATA_PARALLEL = ["devices=2"]
PIPELINE = ["devices=2", "reward_model.pipeline_model_parallel_size=2"]


class RankedServer(RealServer):
    """A process of examples/serve_reward_model.py under torchrun, and its ranks."""

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


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ModelFiles:
    return ModelFiles.make(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(files, tmp_path) -> Iterator[Callable[..., ToyServer]]:
    started: list[ToyServer] = []

    def start_one(*overrides: str, port: int | None = None) -> ToyServer:
        kind = (
            RankedServer
            if any(override.startswith("devices=") for override in overrides)
            else RealServer
        )
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        started.append(kind(folder, *files.overrides, *overrides, port=port).start())
        return started[-1]

    yield start_one
    for server in started:
        server.close()


def check_end(server: ToyServer, seconds: float) -> str:
    """Check that the server ends with the code of a lost rank and leaves nothing.

    Return its log.
    """
    assert server.process.wait(seconds) == EXIT_LOST_RANK
    assert wait_for(lambda: not server.left_behind()), server.left_behind()
    return server.log.read_text()


def health_until_the_end(server: ToyServer, seconds: float) -> list[dict[str, Any]]:
    """Return the answers of /health until the server is gone."""
    answers = []
    deadline = time.monotonic() + seconds
    with contextlib.suppress(FailedAttempt):
        while time.monotonic() < deadline:
            answers.append(json.loads(call(server.port, "/health").body))
            time.sleep(0.1)
    return answers


@pytest.mark.slow
def test_a_killed_rank_under_load_is_named_and_every_request_ends_right_on_the_next_server(
    start, files, mesh
):
    server = start(*TENSOR_PARALLEL, "inference.rank_timeout_seconds=20")
    requests = mixed_requests(QUICK_REQUESTS)
    expected = files.scores(mesh, requests)
    answers: list[Rewards] = []
    progress = threading.Semaphore(0)
    load = threading.Thread(
        daemon=True,
        target=lambda: answers.extend(
            score_all(
                server.port,
                requests,
                clients=CLIENTS,
                seconds=LOAD_SECONDS,
                on_answer=progress.release,
            )
        ),
    )
    load.start()
    for _ in range(QUICK_REQUESTS // 2):
        assert progress.acquire(timeout=LOAD_SECONDS)
    _, follower = server.ranks()
    follower.kill()
    health = health_until_the_end(server, 60)
    log = check_end(server, 60)
    states = [(answer["state"], answer["healthy"]) for answer in health[-1:]]
    assert states == [("failed", False)]
    assert health[-1]["text"].startswith(
        f"rank 1 (host {os.uname().nodename}, process {follower.pid}) died"
    )
    assert (
        f"event=rank_lost reason=rank 1 (host {os.uname().nodename}, process {follower.pid}) died"
        in log
    )
    assert f"error: rank 1 (host {os.uname().nodename}, process {follower.pid}) died" in log
    # Now on one rank; for its clients it is the same server.
    after = start(
        "inference.max_queue_delay_ms=5", "inference.tokens_per_micro_batch=128", port=server.port
    )
    load.join(LOAD_SECONDS)
    check_scores(answers, expected)
    some = requests[:64]
    alone = score_all(after.port, some, clients=1, seconds=LOAD_SECONDS)
    together = score_all(after.port, some, clients=8, seconds=LOAD_SECONDS)
    values = [answer.values.tolist() for answer in together]
    assert values == [answer.values.tolist() for answer in alone]
    os.kill(after.process.pid, signal.SIGTERM)
    assert after.process.wait(60) == 0


@dataclass(frozen=True)
class Impossible:
    """Overrides that cannot work, and their faults: key, then values."""

    overrides: list[str]
    faults: list[tuple[object, ...]]


IMPOSSIBLE = [
    Impossible(["devices=0"], [("config.value.out_of_range", "devices is 0", "at least 1")]),
    Impossible(
        ["devices=3", "reward_model.tensor_model_parallel_size=2"],
        [
            (
                "config.parallel_sizes.not_a_divisor_of_ranks",
                "reward_model.tensor_model_parallel_size is 2",
                "1 x 3",
            ),
        ],
    ),
    Impossible(
        ["reward_model.sequence_parallel=true"],
        [
            (
                "config.sequence_parallel.without_tensor_parallel",
                "reward_model.sequence_parallel is true",
            ),
        ],
    ),
    Impossible(
        ["devices=4"],
        [
            (
                "config.devices.not_the_ranks_started",
                "2 ranks",
                "WORLD_SIZE",
                "num_nodes x devices",
                "1 x 4 = 4",
            ),
        ],
    ),
    Impossible(
        ["reward_function.name=a.b"],
        [("config.reward_function.several_ranks_started", "2 ranks", "WORLD_SIZE")],
    ),
    Impossible(
        ["reward_function.name=a.b", "devices=4"],
        [("config.devices.several_for_reward_function", "num_nodes x devices", "1 x 4")],
    ),
    Impossible(
        ["reward_model.precision=fp16"],
        [("config.value.not_a_choice", "reward_model.precision is 'fp16'", "auto, 32, bf16")],
    ),
    Impossible(
        ["inference.rank_timeout_seconds=0", "num_nodes=-1"],
        [
            ("config.value.out_of_range", "inference.rank_timeout_seconds is 0"),
            ("config.value.out_of_range", "num_nodes is -1"),
        ],
    ),
    Impossible(
        ["inference.name=a/b", "inference.port=-1"],
        [
            ("config.inference.name.invalid", "inference.name is 'a/b'"),
            ("config.value.out_of_range", "inference.port is -1", "0 to 65535"),
        ],
    ),
    Impossible(
        ["inference.preferred_batch_sizes=[512]"],
        [
            (
                "config.preferred_batch_sizes.out_of_range",
                "inference.preferred_batch_sizes is [512]",
                "from 1 to",
                "inference.max_batch_size",
            ),
        ],
    ),
    Impossible(
        ["inference.max_request_bytes=9", "inference.max_queue=-1"],
        [
            ("config.value.out_of_range", "inference.max_request_bytes is 9"),
            ("config.value.out_of_range", "inference.max_queue is -1"),
        ],
    ),
]


@pytest.mark.parametrize(
    "impossible", IMPOSSIBLE, ids=[" ".join(each.overrides) for each in IMPOSSIBLE]
)
def test_impossible_settings_are_named(files, monkeypatch, impossible):
    monkeypatch.setenv("WORLD_SIZE", "2")
    plain = OmegaConf.load(CONF_FOLDER / "serve_reward_model.yaml")
    overrides = OmegaConf.from_dotlist([*files.overrides, *impossible.overrides])
    cfg = OmegaConf.merge(plain, overrides)
    faults = read_config(cfg, ServeRewardModelConfig)[1]  # type: ignore[arg-type]
    for key, *values in impossible.faults:
        check_fault(faults, key, *values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [TENSOR_PARALLEL, PIPELINE, DATA_PARALLEL], ids=["tp2", "pp2", "dp2"]
)
def test_deterministic_scores_of_several_ranks_do_not_depend_on_other_clients(
    start, files, mesh, layout
):
    server = start(*layout, "inference.max_queue_delay_ms=5")
    requests = mixed_requests(80, most=20)
    alone = score_all(server.port, requests, clients=1, seconds=LOAD_SECONDS)
    together = score_all(server.port, requests, clients=8, seconds=LOAD_SECONDS)
    values = [answer.values.tolist() for answer in together]
    assert values == [answer.values.tolist() for answer in alone]
    check_scores(alone, files.scores(mesh, requests))
    server.process.terminate()  # the launcher forwards it to the ranks
    assert server.process.wait(60) == EXIT_FINISHED
    assert "event=stopped signal=SIGTERM" in server.log.read_text()
    assert "rank_lost" not in server.log.read_text()
    assert wait_for(lambda: not server.left_behind()), server.left_behind()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "deterministic", "count"),
    [
        ([], "true", 1000),
        (TENSOR_PARALLEL, "true", 300),
        (DATA_PARALLEL, "true", 300),
        ([], "false", 300),
        (TENSOR_PARALLEL, "false", 300),
        (DATA_PARALLEL, "false", 1000),
    ],
    ids=["one", "tp2", "dp2", "one-merged", "tp2-merged", "dp2-merged"],
)
def test_many_requests(start, files, mesh, options, deterministic, count):
    merging = ["inference.max_queue_delay_ms=2", "inference.preferred_batch_sizes=[16,32]"]
    server = start(*options, *merging, f"inference.deterministic={deterministic}")
    requests = mixed_requests(count)
    answers = score_all(server.port, requests, clients=CLIENTS, seconds=LOAD_SECONDS)
    check_scores(answers, files.scores(mesh, requests))


@pytest.mark.slow
def test_requests_of_smollm2(mesh, tmp_path):
    """64 clients share a server of a real model with a short queue; some of them must retry."""
    files = ModelFiles(tmp_path, smollm2_folder())
    weight = torch.randn(576, generator=torch.Generator().manual_seed(0)) / 24
    RewardHead(weight, torch.tensor(0.5), "mean").save(files.head)
    with RealServer(
        tmp_path, *files.overrides, "inference.max_in_flight=8", "inference.max_queue=20"
    ) as server:
        requests = mixed_requests(CLIENTS, most=2)
        answers = score_all(server.port, requests, clients=CLIENTS, seconds=SMOLLM2_SECONDS)
        refused = server.log.read_text().count("code=503")
    assert refused > 0
    check_scores(answers, files.scores(mesh, requests))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [TENSOR_PARALLEL, PIPELINE, DATA_PARALLEL], ids=["tp2", "pp2", "dp2"]
)
def test_a_stopped_rank_is_named_and_ended(start, layout):
    server = start(*layout, "inference.rank_timeout_seconds=10")
    _, follower = server.ranks()
    follower.suspend()
    log = check_end(server, 90)  # torchrun gives a rank 30 s between SIGTERM and SIGKILL
    rank = f"rank 1 (host {os.uname().nodename}, process {follower.pid})"
    assert f"{rank} hangs: it sent no heartbeat" in log


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_a_lost_rank_0_takes_the_others_along(start, files, mesh, how):
    server = start(*TENSOR_PARALLEL, "inference.rank_timeout_seconds=10")
    rank_0, rank_1 = server.ranks()
    getattr(rank_0, how)()
    log = check_end(server, 90)
    reason = "died" if how == "kill" else "hangs"
    assert f"rank 0 (host {os.uname().nodename}, process {rank_0.pid}) {reason}" in log
    assert not is_alive(rank_1)
    server.start()
    requests = mixed_requests(10)
    check_scores(
        score_all(server.port, requests, clients=4, seconds=60), files.scores(mesh, requests)
    )


@pytest.mark.slow
def test_a_killed_launcher_takes_the_ranks_along(start):
    server = start(*TENSOR_PARALLEL)
    server.process.kill()
    server.process.wait(10)
    assert wait_for(lambda: not server.left_behind()), server.left_behind()
    assert "event=stopped signal=SIGTERM" in server.log.read_text()
