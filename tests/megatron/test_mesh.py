"""The layout of ranks, and errors that reach all ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.errors import raises_error
from helpers.ranks import run_ranks
from helpers.toy_server import free_port

from reinforce_rl.errors import EXIT_LOST_RANK, CheckpointError
from reinforce_rl.megatron.mesh import parallel_mesh

SCRIPT = Path(__file__).parents[1] / "helpers/rank_scripts/mesh.py"


def test_one_rank_without_a_launcher():
    for _ in range(2):  # a mesh can be opened again after it is closed
        with parallel_mesh() as mesh:
            assert mesh.rank == 0
            assert mesh.world_size == 1
            assert mesh.dp_size == 1
            assert mesh.tp_size == 1
            assert mesh.is_main
            assert mesh.gather_over_dp("x") == ["x"]
            values = torch.tensor([1.5, 2.0])
            assert torch.equal(mesh.sum_over_dp(values), values)
            assert mesh.sum_over_dp(values) is not values
            assert mesh.from_model_parallel_rank_0([1]) == [1]
            assert mesh.any_rank(True) is True
            assert mesh.any_rank(False) is False
            mesh.raise_if_any(None)
            with pytest.raises(CheckpointError, match=r"^gone$"):
                mesh.raise_if_any(CheckpointError("gone"))


@pytest.mark.more
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_does_not_come(monkeypatch, rank):
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    values = (f"rank {rank}", socket.gethostname(), f"localhost:{port}")
    with (
        raises_error("ranks.rendezvous.failed", *values) as caught,
        parallel_mesh(timeout_seconds=2),
    ):
        pass
    assert caught.value.exit_code == EXIT_LOST_RANK
    assert not torch.distributed.is_initialized()


LONE_RANK = """
import sys
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.runtime.stop import StopNow, StopRequest
StopRequest.on_signals()
print("ready", flush=True)
try:
    with parallel_mesh(timeout_seconds=600):
        print("another rank came", flush=True)
except StopNow:
    print("stopped", flush=True)
    os._exit(75)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_waits_for_others_is_stopped_by_a_signal(rank):
    port = free_port()
    place = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environment = {**os.environ, **place, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", f"import os\n{LONE_RANK}"]
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75
    assert output == "stopped\n"


def test_closed_after_an_error():
    with pytest.raises(ValueError, match="inside"), parallel_mesh():
        raise ValueError("inside")
    assert not torch.distributed.is_initialized()
    with parallel_mesh():
        pass


def test_ranks_that_do_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        raises_error(
            "config.parallel_sizes.not_a_divisor_of_ranks",
            "model.tensor_model_parallel_size is 2",
            "3 ranks",
        ),
        parallel_mesh(tensor_model_parallel_size=2),
    ):
        pass
    assert not torch.distributed.is_initialized()


def test_two_ranks():
    output = run_ranks(SCRIPT, 2)
    assert output.count("all checks passed") == 2


@pytest.mark.parametrize("tp_size", [1, 2])
def test_nothing_but_tensors_of_a_gpu_is_handed_to_nccl(tp_size):
    # One mesh a launch: another mesh would read the first one's addresses from the launcher's
    # store.
    output = run_ranks(SCRIPT.with_name("mixed_backends.py"), 2, tp_size)
    assert output.count("all checks passed") == 2


@pytest.mark.slow
def test_four_ranks_in_several_layouts():
    output = run_ranks(SCRIPT.with_name("mesh_of_four.py"), 4)
    assert output.count("all checks passed") == 4
    assert (
        "4 ranks: 1 data x 2 pipeline x 1 context x 2 tensor parallel\n"
        "  data 0: stage 0 [0 1], stage 1 [2 3]"
    ) in output
    assert (
        "4 ranks: 1 data x 2 pipeline x 2 context x 1 tensor parallel\n  data 0: stage 0 [0 | 1]"
        in output
    )
    assert (
        "4 ranks: 2 data x 2 pipeline x 1 context x 1 tensor parallel\n"
        "  data 0: stage 0 [0], stage 1 [2]"
    ) in output
