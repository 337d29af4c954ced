"""The whole trainer on a tiny random model: a straight run, one that is killed and goes on, offloaded Adam, LoRA."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_checks.base import FAKE, Context, Finding, judged
from gpu_checks.runner import ROOT
from gpu_checks.runs import Line, Runs, largest_difference, not_finite
from reinforce_rl.megatron.checkpointer import latest_checkpoint

STEPS = 12
KILLED_AFTER = 3
TOLERANCE = 1e-2  # of the metrics of the step after a resumption; see `compared`
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]


def check(context: Context) -> Finding:
    runs = Runs(context, "tiny", 24, 8 if context.mode == FAKE else 40)
    if context.mode == FAKE:  # metric is saved there has no values that a comparison could be of
        lines = [runs.run("straight", steps, saves=True) for steps in (1, 2)]
        return judged([], f"{len(lines[-1])} steps, the second after a restore", {})
    straight = runs.run("straight", STEPS, saves=True)
    killed_at = kill(runs.words("killed", STEPS, saves=True), context.folder / "killed", context)
    resumed = runs.run("killed", STEPS, saves=True)
    offloaded = runs.run("offloaded", STEPS, ["model.reinforce.offload_adam_states=true"])
    lora = runs.run("lora", 3, LORA)
    faults = [f"straight run: {metric} is not finite" for metric in not_finite(straight)]
    faults += [f"LoRA: {metric} is not finite" for metric in not_finite(lora)]
    if killed_at is None:
        faults.append(
            f"the run that was to be killed after step {KILLED_AFTER} had no checkpoint, or ended by itself"
        )
    numbers: dict[str, Any] = {
        "killed at step": killed_at,
        "LoRA's gradient norms": [x["train/grad_norm"] for x in lora],
    }
    numbers["resumed"] = compared("resumed", straight, resumed, killed_at or 1, faults)
    numbers["offloaded"] = compared("offloaded", straight, offloaded, 1, faults)
    summary = f"{STEPS} steps; killed after step {killed_at} and resumed: {numbers['resumed']}"
    return judged(
        faults, f"{summary}; with offloaded Adam: {numbers['offloaded']}; LoRA ran", numbers
    )


def compared(
    name: str, straight: list[Line], lines: list[Line], same: int, faults: list[str]
) -> str:
    """How a run's metrics differ from the straight one's, in words.

    Both make the first `same` steps in the same way: what they differ by there is the noise of the machine's sums. A
    fault is added where the next step differs by more, or where steps are missing.
    """
    differences = [largest_difference(*pair) for pair in zip(straight, lines, strict=False)]
    noise = max(differences[:same])[0]
    difference, metric = (
        differences[same]
        if len(lines) == len(straight)
        else (math.inf, f"the number of steps {len(lines)}")
    )
    if not difference <= max(TOLERANCE, 10 * noise):
        faults.append(
            f"{name} run: {metric} differs by {difference:.1e} at step {same + 1}, by {noise:.1e} before"
        )
    if max(differences)[0] == 0:
        return "equal to the last digit"
    return (
        f"off by {difference:.1e} at step {same + 1}, by {differences[-1][0]:.1e} at the last, "
        f"by {noise:.1e} before"
    )


def kill(words: list[str], out: Path, context: Context) -> int | None:
    """Start a run and SIGKILL it once it has a checkpoint: the checkpoint's step; None where it ended by itself."""

    def saved() -> int:
        checkpoint = latest_checkpoint(out / "checkpoints")
        return 0 if checkpoint is None else int(checkpoint.trainer_state["step"])

    with (context.folder / "killed.txt").open("w", encoding="utf-8") as log:
        command = [sys.executable, str(ROOT / "examples/train_reinforce_actor.py"), *words]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    while process.poll() is None and saved() < KILLED_AFTER and context.left() > 0:
        time.sleep(0.02)
    process.kill()
    was_killed = process.wait(timeout=30) == -signal.SIGKILL
    return saved() if was_killed and 0 < saved() < STEPS else None
