"""The whole trainer on a tiny random model in bf16: a straight run, one that is killed and goes on, LoRA, offload."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_checks import runs
from gpu_checks.base import FAKE, Context, Finding, judged
from gpu_checks.runner import ROOT
from reinforce_rl.megatron.checkpoint import latest_checkpoint

STEPS, KILLED_AFTER = 12, 3
PROMPT_TOKENS, RESPONSE_TOKENS = 24, 40
TOLERANCE = 1e-2  # of the metrics of the step after a resumption; see `_compared`
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
OFFLOAD = ["model.reinforce.offload_adam_states=true"]


def check(context: Context) -> Finding:
    inputs = context.folder / "inputs"
    runs.write_inputs(inputs, "tiny", PROMPT_TOKENS)
    faults: list[str] = []

    def words(name: str, steps: int, *more: str) -> list[str]:
        out = context.folder / name
        return [*runs.overrides(inputs, out, steps, PROMPT_TOKENS, RESPONSE_TOKENS), *more]

    if context.mode == FAKE:  # nothing can be killed: a fake tensor's values end with its process
        for steps in (1, 2):
            lines = runs.run(words("straight", steps, "trainer.reinforce.save_interval=1"))
        return judged([], f"{len(lines)} steps, of which the second after a restore, ran", {})
    numbers: dict[str, Any] = {}
    straight = runs.run(words("straight", STEPS, "trainer.reinforce.save_interval=1"))
    faults += [f"straight run: {name} is not finite" for name in runs.not_finite(straight)]
    broken = words("killed", STEPS, "trainer.reinforce.save_interval=1")
    numbers["killed at step"] = killed_at = _kill(broken, context.folder / "killed", context)
    if killed_at is None:
        faults.append(f"the run that was to be killed after step {KILLED_AFTER} had no checkpoint or ended before")
    resumed = runs.run(broken)
    if len(resumed) != len(straight):
        faults.append(f"the resumed run has {len(resumed)} steps, the straight one {len(straight)}")
    offloaded = runs.run(words("offloaded", STEPS, "trainer.reinforce.save_interval=0", *OFFLOAD))
    for name, lines, same in (("resumed", resumed, killed_at or 1), ("offloaded", offloaded, 1)):
        numbers[name] = _compared(name, straight, lines, same, faults)
    lora = runs.run(words("lora", 3, "trainer.reinforce.save_interval=0", *LORA))
    faults += [f"LoRA run: {name} is not finite" for name in runs.not_finite(lora)]
    numbers["LoRA's gradient norm"] = [line["train/grad_norm"] for line in lora]
    told = f"{STEPS} steps; killed after step {killed_at} and resumed: {numbers['resumed']}"
    return judged(faults, f"{told}; with offloaded Adam: {numbers['offloaded']}; LoRA ran", numbers)


def _compared(name: str, straight: list[Any], lines: list[Any], same: int, faults: list[str]) -> str:
    """How a run differs from the straight one, in words.

    Args:
        name: of the run.
        straight, lines: of both runs' metrics.
        same: steps that both make in the same way. What they differ by there is the noise of the machine's sums.
        faults: gets a fault where the next step differs by more.
    """
    differences = [runs.largest_difference(*pair) for pair in zip(straight, lines, strict=False)]
    noise = max(differences[:same])[0]
    found, metric = differences[same] if same < len(differences) else (math.inf, "the step itself")
    if not found <= max(TOLERANCE, 10 * noise):
        faults.append(
            f"{name} run: {metric} differs by {found:.1e} at step {same + 1}, where two runs differ by {noise:.1e}"
        )
    if max(differences)[0] == 0:
        return "equal to the last digit"
    return f"off by {found:.1e} at step {same + 1}, by {differences[-1][0]:.1e} at the last, by {noise:.1e} before"


def _kill(words: list[str], out: Path, context: Context) -> int | None:
    """Start a run, end it by SIGKILL once it has a checkpoint: the checkpoint's step; None where it ended by itself."""
    command = [sys.executable, str(ROOT / "examples/train_reinforce_actor.py"), *words]
    with (context.folder / "killed.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=False)
    try:
        while process.poll() is None and context.left() > 0:
            found = latest_checkpoint(out / "checkpoints") if (out / "checkpoints").exists() else None
            if found is not None and found.trainer_state["step"] >= KILLED_AFTER:
                break
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    code = process.wait(timeout=30)
    found = latest_checkpoint(out / "checkpoints") if (out / "checkpoints").exists() else None
    if code != -signal.SIGKILL or found is None or found.trainer_state["step"] >= STEPS:
        return None
    return int(found.trainer_state["step"])
