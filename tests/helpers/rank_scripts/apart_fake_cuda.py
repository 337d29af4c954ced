"""One rank of a run that generates on ranks of its own, each rank with a fake GPU of its own; under `utils.ranks`.

Usage: apart_fake_cuda.py FOLDER OVERRIDE... Everything between the ranks is real but the weights on their way: a
broadcast checks the sender's tensor, and gives the receiver zeros.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.fake_cuda.machine import Machine, install


def main() -> None:
    machine = install()  # before anything imports torch
    from helpers.rewards import FunctionReward
    from helpers.tiny_run import PROMPT_TOKENS, compose, odd_share, tiny_overrides

    from reinforce_rl.config.load import load_config
    from reinforce_rl.rollout import worker
    from reinforce_rl.rollout.weight_group import ElasticWeightGroup
    from reinforce_rl.trainer import run as build

    folder = Path(sys.argv[1])
    overrides = sys.argv[2:]
    ElasticWeightGroup.form = form  # type: ignore[method-assign]
    ElasticWeightGroup.broadcast = broadcast  # type: ignore[method-assign, assignment]
    for module in (build, worker):
        module.connect_to_reward_servers = lambda *args: FunctionReward(odd_share, PROMPT_TOKENS)  # type: ignore[assignment]
    on_threads_too(machine)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    with machine.rank(rank, size):
        trainer = build.train(load_config(compose(*tiny_overrides(folder), *overrides)))
        assert (trainer is None) == (rank > 0)


def form(group: Any, epoch: int, rank: int, *rest: Any) -> None:
    assert group._device.type == "cuda"
    group._sends = rank == 0
    group.epoch = epoch
    group.fault = ""


def broadcast(group: Any, tensor: Any) -> Any:
    assert tensor.is_cuda and tensor.is_contiguous()
    if not group._sends:
        tensor.zero_()  # every token is as likely then
    return SimpleNamespace(wait=lambda: None)


def on_threads_too(machine: Machine) -> None:
    """Have the thread that receives weights see the fake GPU; a mode of torch is its own thread's."""
    from reinforce_rl.rollout.generator_rank import GeneratorRank

    receive = GeneratorRank._receive

    def with_gpu(rank: GeneratorRank) -> None:
        with machine.gpu:
            receive(rank)

    GeneratorRank._receive = with_gpu  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
