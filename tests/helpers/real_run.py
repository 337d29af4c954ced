"""The project's programs as processes on a tiny model: server, actor and launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from helpers.models import tiny_llama_folder
from helpers.ranks import kill_tree
from helpers.tiny_run import three_letters, write_prompts
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.toy_server import ToyServer

from reinforce_rl.errors import DataError
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.utils.process import die_with_parent

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCAB_SIZE = 64
OTHER_VOCAB_SIZE = 48
STEPS = 32


@dataclass(frozen=True)
class World:
    """Input files of a run, created in `folder`."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> World:
        world = cls(folder)
        tiny_llama_folder(world.policy, vocab_size=VOCAB_SIZE, seed=0)
        tiny_llama_folder(world.trunk, vocab_size=VOCAB_SIZE, seed=1)
        write_tiny_tokenizer(world.other_tokenizer, vocab_size=OTHER_VOCAB_SIZE)
        weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
        for pooling in ("mean", "last"):
            RewardHead(weight, torch.tensor(0.5), pooling).save(world.head(pooling))
        prompts = three_letters(96)
        write_prompts(folder / "train.jsonl", prompts[:64])
        write_prompts(folder / "validation.jsonl", prompts[64:])
        return world

    @property
    def policy(self) -> Path:
        return self.folder / "policy"

    @property
    def trunk(self) -> Path:
        return self.folder / "trunk"

    @property
    def other_tokenizer(self) -> Path:
        return self.folder / "other_tokenizer"

    def head(self, pooling: str) -> Path:
        return self.folder / f"head_{pooling}.safetensors"

    def server_overrides(self, pooling: str) -> list[str]:
        return [
            f"reward_model.restore_from_path={self.trunk}",
            f"reward_model.head_path={self.head(pooling)}",
        ]

    def actor_overrides(self, run_dir: Path, *overrides: str) -> list[str]:
        return [
            f"pretrained_checkpoint.restore_from_path={self.policy}",
            f"model.data.data_prefix.train={self.folder / 'train.jsonl'}",
            f"model.data.data_prefix.validation={self.folder / 'validation.jsonl'}",
            f"exp_manager.explicit_log_dir={run_dir}",
            "trainer.reinforce.max_epochs=10",
            f"trainer.reinforce.max_steps={STEPS}",
            f"trainer.reinforce.val_check_interval={STEPS // 2}",
            "model.encoder_seq_length=32",
            "model.micro_batch_size=32",
            "model.reinforce.length_params.max_length=8",
            "model.reinforce.rollout_micro_batch_size=4",  # two requests a step
            "model.optim.lr=0.01",
            *overrides,
        ]


class RealServer(ToyServer):
    """A process of examples/serve_reward_model.py; options are Hydra overrides."""

    script = EXAMPLES / "serve_reward_model.py"


class Actor:
    """A process of examples/train_reinforce_actor.py."""

    def __init__(self, world: World, run_dir: Path, port: int, *overrides: str):
        self.run_dir = run_dir
        self.log = run_dir.with_name(f"{run_dir.name}.log")
        where = ["remote_rm.reward_model.ip=127.0.0.1", f"remote_rm.reward_model.port={port}"]
        command = [sys.executable, str(EXAMPLES / "train_reinforce_actor.py")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *world.actor_overrides(run_dir, *where, *overrides)],
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def step(self) -> int:
        """Return the step of the last complete metrics line; -1 if none."""
        with contextlib.suppress(DataError):
            lines = read_metrics(self.run_dir / "metrics.jsonl")
            return lines[-1]["step"] if lines else -1
        return -1

    def finish(self, seconds: float) -> int:
        """Wait and return the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the actor ran past {seconds} s:\n{self.output}") from None

    def close(self) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
