"""What changes kernels or streams on a GPU: each on against off, in whole runs of the trainer.

Most run on 135M. What saves arithmetic runs on 1B, where a step waits for the GPU, not the host.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpu_checks.base import CUDA, FAKE, Context, Finding, judged
from gpu_checks.runner import is_installed
from gpu_checks.runs import Line, Runs, largest_difference, not_finite
from reinforce_rl.errors import ConfigError

STEPS = 3
TRAINING = "training"
GENERATION = "generation"
GAP = "train/generator_logprob_diff"  # nats between the generator's log-probs and the trainer's
PADDING = "train/padding_fraction"  # packing is there to change it


class RunSize(NamedTuple):
    """One of `SHAPES`, the most tokens of a prompt and of a response, and seconds for two runs."""

    shape: str
    prompt_tokens: int
    response_tokens: int
    seconds: float


SMALL = RunSize("135m", 192, 128, 20)
LARGE = RunSize("1b", 512, 128, 60)
TINY = RunSize("tiny", 24, 8, 20)  # where numbers are not a GPU's


@dataclass(frozen=True)
class Switch:
    """A row of the table.

    Attributes:
        name: in the report.
        on, off: overrides of the two runs.
        affects: TRAINING: the first step's metrics must agree. GENERATION: the samples may differ,
            and the generator's log-probs must be as near to the trainer's as without it.
        tolerance: of this comparison, relative above 1.
        needs: a module.
        gpus: of which it makes sense.
        run: the model and the lengths of its two runs, on a GPU.
    """

    name: str
    on: Sequence[str]
    affects: str = TRAINING
    tolerance: float = 0.01
    off: Sequence[str] = ()
    needs: str | None = None
    gpus: int = 1
    run: RunSize = SMALL


PACKED = "model.shared_prefix"
SUMS = "model.optim.overlap_grad_sync"
GRAPHS = "model.reinforce.cuda_graphs"
STATIC = "model.reinforce.static_decoding"
OFFLOAD = "model.reinforce.offload_adam_states=true"
SWITCHES = (  # one whose key this version does not have is not tried
    Switch(
        "decode steps as CUDA graphs",
        [f"{STATIC}=true", f"{GRAPHS}=true"],
        GENERATION,
        off=[f"{STATIC}=true", f"{GRAPHS}=false"],
    ),
    Switch(
        "Adam's states return beside log-probs",
        [OFFLOAD, "model.reinforce.overlap_offload=true"],
        off=[OFFLOAD],
    ),
    Switch(
        "packed groups, each prompt attended once",
        [f"{PACKED}=true"],
        TRAINING,
        0.05,
        [f"{PACKED}=false"],
        run=LARGE,
    ),
    Switch(
        "decode steps of static shape",
        [f"{STATIC}=true", f"{GRAPHS}=false"],
        GENERATION,
        off=[f"{STATIC}=false"],
    ),
    Switch(
        "Transformer Engine",
        ["model.transformer_engine=true"],
        GENERATION,
        0.02,
        needs="transformer_engine",
    ),
    Switch(
        "distributed optimizer",
        ["model.optim.distributed=true"],
        off=["model.optim.distributed=false"],
    ),
    Switch("overlapped gradient sums", [f"{SUMS}=true"], off=[f"{SUMS}=false"]),
    Switch("context-parallel attention", ["model.context_parallel_size=2"], gpus=2),
)


def check(context: Context) -> Finding:
    steps = 1 if context.mode == FAKE else STEPS

    @functools.cache
    def runs_of(size: RunSize) -> Runs:
        folder = context.folder / size.shape
        folder.mkdir()
        return Runs(
            replace(context, folder=folder), size.shape, size.prompt_tokens, size.response_tokens
        )

    made: dict[tuple[RunSize, tuple[str, ...]], list[Line]] = {}

    def lines_of(size: RunSize, words: Sequence[str], name: str) -> list[Line]:
        """The metrics of a run, which is made once."""
        key = (size, tuple(words))
        if key not in made:
            made[key] = runs_of(size).run(name, steps, words)
        return made[key]

    rows: list[dict[str, Any]] = []
    for number, switch in enumerate(SWITCHES):
        row: dict[str, Any] = {"switch": switch.name, "key": " ".join(switch.on)}
        reason = why_not(switch, context)
        if reason is None:
            try:
                size = switch.run if context.mode == CUDA else TINY
                # Without numbers there is nothing to compare: the run without the switch is left
                # out.
                if context.mode == FAKE:
                    lines_of(size, switch.on, f"on_{number}")
                    row |= {"advice": "runs", "why": "numbers are not real here"}
                else:
                    off = lines_of(size, switch.off, f"off_{number}")
                    on = lines_of(size, switch.on, f"on_{number}")
                    row |= judge(switch, off, on, context.mode)
            except ConfigError as error:
                reason = str(error)[:200]
            except Exception as error:  # one that crashes does not take the others with it
                row |= {
                    "advice": "leave it off",
                    "why": f"{type(error).__name__}: {str(error)[:200]}",
                }
        if reason is not None:
            row |= {"advice": "not tried", "why": reason}
        rows.append(row)
    faults = [f"{row['switch']}: {row['why']}" for row in rows if row["advice"] == "leave it off"]
    tried = sum(row["advice"] != "not tried" for row in rows)
    result = "without numbers" if context.mode == FAKE else "all with the same numbers"
    return judged(faults, f"{tried} of {len(rows)} tried, {result}", {"switches": rows})


def why_not(switch: Switch, context: Context) -> str | None:
    """Why a switch cannot be tried here."""
    if switch.needs is not None and not is_installed(switch.needs):
        return f"{switch.needs} is not installed"
    if switch.gpus > 1:
        return f"takes {switch.gpus} GPUs: NCCL refuses two ranks on one"
    size = switch.run if context.mode == CUDA else TINY
    return "no time left" if context.left() < size.seconds else None


def judge(switch: Switch, off: list[Line], on: list[Line], mode: str) -> dict[str, Any]:
    """Advice, and the numbers that it comes of, from the metrics of both runs."""
    if switch.affects == TRAINING:
        difference, metric = largest_difference(
            *({k: v for k, v in x[0].items() if k != PADDING} for x in (off, on))
        )
    else:
        difference = float(on[0][GAP]) - 1.5 * float(off[0][GAP])
        metric = GAP
    row: dict[str, Any] = {"difference": difference, "of": metric}
    broken = not_finite(on)
    if broken or not difference <= switch.tolerance:
        deviation = (
            f"{broken[0]} is not finite" if broken else f"{metric} differs by {difference:.2g}"
        )
        return {
            "advice": "leave it off",
            "why": f"{deviation}, expected {switch.tolerance:g} at most",
            **row,
        }
    if mode != CUDA:
        return {"advice": "right", "why": "no time is measured here", **row}
    row["speedup"] = speedup = seconds_a_step(off) / seconds_a_step(on)
    row |= {"GB off": most_memory(off), "GB on": most_memory(on)}
    pays = speedup > 1.02 or (speedup > 0.98 and row["GB on"] < 0.95 * row["GB off"])
    return {"advice": "turn it on" if pays else "no gain", "why": "same numbers", **row}


def seconds_a_step(lines: list[Line]) -> float:
    """The median of all but the first, in which kernels are chosen."""
    return statistics.median(line["timers/step_time"] for line in lines[1:])


def most_memory(lines: list[Line]) -> float:
    """GB of the phase that takes most."""
    return max(
        value for line in lines for name, value in line.items() if name.startswith("memory/")
    )
