"""The steps of a workload by TRL's RLOOTrainer: python -m rloo_step.trl_side WORKLOAD.json REPORT.json

Runs in the environment of `tools/make_environment.py peers`. Every method of TRL runs unmodified; those that make up a
phase are timed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # type: ignore[import-not-found]
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import RLOOConfig, RLOOTrainer  # type: ignore[import-not-found]

from rloo_step import workload as w
from rloo_step.reward import vowels


class Recorder(TrainerCallback):
    """What each step did.

    Attributes:
        steps: the complete ones.
        phases: seconds of the present step.
        samples: of the present step.
    """

    def __init__(self) -> None:
        self.steps: list[w.Step] = []
        self.phases: dict[str, float] = {}
        self.samples: list[w.Sample] = []
        self._began = 0.0
        self._trained = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block belongs to it."""
        started = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started

    def trained(self) -> None:
        """The gradient is there: what comes next is its clipping and the optimizer."""
        self._trained = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        self.phases = {}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.phases[w.OPTIMIZER] = time.perf_counter() - self._trained

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._began
        self.steps.append(w.Step(seconds, w.with_other(seconds, self.phases), self.samples))


class MeasuredTrainer(RLOOTrainer):
    """TRL's trainer with its phases timed; `recorder` is set before the first step."""

    recorder: Recorder
    prompt_ids: list[list[int]]

    def training_step(self, *args: Any, **keys: Any) -> Any:
        before = sum(self.recorder.phases.values())
        started = time.perf_counter()
        loss = super().training_step(*args, **keys)
        rollout = sum(self.recorder.phases.values()) - before
        phases = self.recorder.phases
        phases[w.TRAINING] = phases.get(w.TRAINING, 0.0) + time.perf_counter() - started - rollout
        self.recorder.trained()
        return loss

    def _generate(self, prompts: list[Any]) -> Any:
        with self.recorder.phase(w.GENERATION):
            generated = super()._generate(prompts)
        self.prompt_ids = generated[0]
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        with self.recorder.phase(w.REWARDS):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        columns = (
            self.prompt_ids,
            map(len, completion_ids_list),
            completions,
            rewards[:, 0].tolist(),
        )
        self.recorder.samples = [w.Sample(*fields) for fields in zip(*columns, strict=True)]
        return rewards

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **keys: Any) -> Any:
        if torch.is_grad_enabled():  # of the loss
            return super()._get_per_token_logps_and_entropies(model, *args, **keys)
        with self.recorder.phase(w.REFERENCE if model is self.ref_model else w.LOG_PROBS):
            return super()._get_per_token_logps_and_entropies(model, *args, **keys)


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """`vowels` as TRL calls a reward function."""
    return [
        vowels(prompt, completion, {})
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def run(workload: w.Workload, folder: Path) -> w.SideReport:
    """
    Args:
        workload: what to do.
        folder: that TRL may write to.
    """
    torch.set_num_threads(workload.threads)
    recorder = Recorder()
    trainer = MeasuredTrainer(
        model=workload.model,
        reward_funcs=reward,
        args=RLOOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=workload.batch,
            gradient_accumulation_steps=workload.sequences // workload.batch,
            num_generations=workload.group,
            max_completion_length=workload.response_tokens,
            # no response may end early
            generation_kwargs={"min_new_tokens": workload.response_tokens},
            shuffle_dataset=False,
            beta=workload.beta,
            learning_rate=workload.lr,
            lr_scheduler_type="constant",
            max_steps=len(workload.prompts),
            # TRL would compute activations again in the backward pass, and the other side does not.
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32", "trust_remote_code": False},
            bf16=False,
            use_cpu=True,
            seed=workload.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": text} for step in workload.prompts for text in step]
        ),
        processing_class=AutoTokenizer.from_pretrained(workload.model, trust_remote_code=False),
        callbacks=[recorder],
    )
    trainer.recorder = recorder
    trainer.train()
    weights = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return w.SideReport(
        side=f"TRL {trl.__version__}",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        threads=torch.get_num_threads(),
        parameters=sum(weight.numel() for weight in weights),
        dtype=str(weights[0].dtype).removeprefix("torch."),
        steps=recorder.steps,
        peak_bytes=w.peak_resident_bytes([os.getpid()]),
    )


def main(workload: str, report: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        w.write(Path(report), run(w.read_workload(Path(workload)), Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
