"""Run a workload with this project's trainer: python -m rloo_step.ours WORKLOAD.json REPORT.json"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import reinforce_rl
from reinforce_rl.config.compose import compose
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.monitoring.records import RolloutRow, Samples
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.trainer.run import build_trainer
from rloo_step import workload as w

TIMERS = {
    w.GENERATION: "generate",
    w.LOG_PROBS: "logprobs",
    w.REFERENCE: "init_logprobs",
    w.REWARDS: "reward_wait",
}


class Recorder(SilentMonitor):
    """Keeps what the trainer tells of its steps.

    Attributes:
        timings: seconds of each step's phases.
        rows: the samples of each step.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.timings: list[dict[str, float]] = []
        self.rows: list[Sequence[RolloutRow]] = []

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        samples: Samples,
        memory: Mapping[str, float],
    ) -> None:
        self.timings.append(dict(timings))
        self.rows.append(samples.rows)


class NoCheckpoints:
    """In place of the checkpointer: the trainer saves at its end, which belongs to no step."""

    is_writing = False

    def save(self, step: int, state: dict, **options: Any) -> None:
        pass

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        pass


def overrides(workload: w.Workload, folder: Path) -> list[str]:
    """The command line of `examples/train_reinforce_actor.py` that the workload amounts to."""
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) + "\n" for step in workload.prompts for text in step]
    prompts.write_text("".join(lines), encoding="utf-8")
    count = len(workload.prompts[0])
    tokens = workload.response_tokens
    return [
        f"pretrained_checkpoint.restore_from_path={workload.model}",
        f"model.data.data_prefix.train={prompts}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "reward=function",
        "reward_function.name=rloo_step.reward.vowels",
        "algorithm=rloo",
        f"trainer.reinforce.num_rollouts_per_prompt={workload.group}",
        f"trainer.reinforce.initial_policy_kl_penalty={workload.beta}",
        f"trainer.reinforce.max_steps={len(workload.prompts)}",
        "trainer.reinforce.val_check_interval=0",
        "trainer.reinforce.save_interval=0",
        f"model.seed={workload.seed}",
        *([] if workload.own_batch is None else [f"model.micro_batch_size={workload.own_batch}"]),
        f"model.encoder_seq_length={workload.prompt_tokens + tokens}",
        "model.data.shuffle=false",
        f"model.reinforce.num_rollout_samples={count}",
        f"model.reinforce.rollout_micro_batch_size={count}",
        f"model.reinforce.length_params.max_length={tokens}",
        # No response may end early.
        f"model.reinforce.length_params.min_length={tokens}",
        "model.reinforce.allow_biased_sampling=true",
        # TRL's.
        f"model.optim.lr={workload.lr}",
        "model.optim.weight_decay=0.0",
        "model.optim.betas=[0.9,0.999]",
        *workload.overrides,
    ]


def run(workload: w.Workload, folder: Path) -> w.SideReport:
    """
    Args:
        workload: what to do.
        folder: for files of the run.
    """
    torch.set_num_threads(workload.threads)
    config = load_config(compose("train_reinforce_actor", overrides(workload, folder)))
    recorder = Recorder(folder)
    optimizer_seconds = []
    with parallel_mesh(seed=config.model.seed) as mesh:
        tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
        datasets = build_datasets(config, tokenizer)
        rewards = connect_to_reward_servers(config, mesh, tokenizer, recorder)
        try:
            trainer = build_trainer(config, mesh, tokenizer, datasets, rewards, recorder)
            trainer.ckpt_callback = NoCheckpoints()  # type: ignore[assignment]
            step = trainer.optimizer.step

            def timed_step():  # type: ignore[no-untyped-def]
                started = time.perf_counter()
                result = step()
                optimizer_seconds.append(time.perf_counter() - started)
                return result

            trainer.optimizer.step = timed_step
            trainer.fit()
            process = psutil.Process()
            peak = w.peak_resident_bytes(
                [process.pid, *(child.pid for child in process.children(recursive=True))]
            )
        finally:
            rewards.close()
        weights = [
            parameter for parameter in trainer.model.lm.parameters() if parameter.requires_grad
        ]
    prompts = (datasets.train[i] for i in range(len(datasets.train)))
    tokens = {prompt.text: list(prompt.tokens) for prompt in prompts}
    steps = []
    for timings, optimizer, rows in zip(
        recorder.timings, optimizer_seconds, recorder.rows, strict=True
    ):
        phases = {name: timings.get(timer, 0.0) for name, timer in TIMERS.items()}
        phases |= {w.TRAINING: timings["train_time"] - optimizer, w.OPTIMIZER: optimizer}
        seconds = timings["step_time"]
        samples = [
            w.Sample(tokens[row.prompt], row.response_length, row.response, row.reward)
            for row in rows
        ]
        steps.append(w.Step(seconds, w.with_other(seconds, phases), samples))
    return w.SideReport(
        side=f"reinforce_rl {reinforce_rl.__version__}",
        versions={name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
        threads=torch.get_num_threads(),
        parameters=sum(weight.numel() for weight in weights),
        dtype=str(weights[0].dtype).removeprefix("torch."),
        steps=steps,
        peak_bytes=peak,
    )


def main(workload: str, report: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        w.write(Path(report), run(w.read_workload(Path(workload)), Path(folder)))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(*sys.argv[1:])
