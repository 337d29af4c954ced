"""How far each phase of a step is from the least time that this machine could take for it.

python benchmarks/roofline.py RUN_FOLDER       (of a run on this machine, one rank, fp32)
python benchmarks/roofline.py                  (makes two steps of SmolLM2-135M by itself; about 2 minutes on 2 cores)
python benchmarks/roofline.py --threads 1 ...  (as many as the run had)

Memory bandwidth and matrix rate are measured with so many threads, just before the table is printed. A decode step
reads each weight once; a forward pass takes 2 operations a parameter and token, training 6, and Adam reads and writes
its numbers once. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from omegaconf import DictConfig, OmegaConf  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rloo_step import floors, rates, workload  # noqa: E402
from rloo_step.inputs import make_prompts  # noqa: E402
from rloo_step.parts import parts_of  # noqa: E402
from rloo_step.processes import OURS, SideFailed, run_side  # noqa: E402

from reinforce_rl.data.tokenizer import load_tokenizer  # noqa: E402
from reinforce_rl.errors import ReinforceError  # noqa: E402
from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2  # noqa: E402
from reinforce_rl.megatron.architecture import Architecture  # noqa: E402
from reinforce_rl.monitoring.loggers import read_metrics  # noqa: E402
from reinforce_rl.monitoring.records import read_rows, rollout_files  # noqa: E402

GENERATE = "generate"
LOG_PROBS = "logprobs"
REFERENCE = "init_logprobs"
TRAINING = "train_time"
PHASES = (GENERATE, LOG_PROBS, REFERENCE, TRAINING)
# of the steps that are made here
PROMPTS = 4
GROUP = 4
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 48
SIDE_SECONDS = 1800


@dataclass(frozen=True)
class MeasuredStep:
    """One step.

    Attributes:
        seconds: of those of `PHASES` that it had.
        tokens: that it had to compute.
    """

    seconds: dict[str, float]
    tokens: floors.StepTokens


@dataclass(frozen=True)
class Row:
    """A phase: medians over steps, in seconds."""

    name: str
    seconds: float
    floor: floors.Floor


def floor_of(
    phase: str, machine: floors.Machine, model: floors.ModelParts, tokens: floors.StepTokens
) -> floors.Floor:
    if phase == GENERATE:
        return floors.generation_floor(machine, model, tokens)
    if phase == TRAINING:
        return floors.training_floor(machine, model, tokens)
    return floors.pass_floor(machine, model, tokens, floors.FORWARD)


def table_rows(
    machine: floors.Machine, model: floors.ModelParts, steps: list[MeasuredStep]
) -> list[Row]:
    """The phases that the steps had, and their sum."""
    rows = []
    for phase in PHASES:
        having = [step for step in steps if phase in step.seconds]
        if not having:
            continue
        step_floors = [floor_of(phase, machine, model, step.tokens) for step in having]
        floor = floors.Floor(
            statistics.median(each.shared for each in step_floors),
            statistics.median(each.repeated for each in step_floors),
        )
        rows.append(Row(phase, statistics.median(step.seconds[phase] for step in having), floor))
    total = floors.Floor(
        sum(row.floor.shared for row in rows), sum(row.floor.repeated for row in rows)
    )
    return [*rows, Row("together", sum(row.seconds for row in rows), total)]


def steps_of_run(folder: Path) -> tuple[Path, list[MeasuredStep]]:
    """The model of a run, and its steps without the first.

    Raises:
        ValueError: the run has no such steps, or the floors do not hold for it.
    """
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    expected = {
        "trainer.num_nodes": 1,
        "trainer.devices": 1,
        "trainer.precision": "32",
        "model.peft.peft_scheme": None,
        "trainer.reinforce.reinforce_epochs": 1,
        "trainer.reinforce.dynamic_filtering": False,
        "generation": "native",
    }
    for key, value in expected.items():
        configured = OmegaConf.select(config, key)
        if configured != value:
            raise ValueError(
                f"{folder}: {key} is {configured!r}; the floors are those of a run with {value!r}"
            )
    group = int(config.trainer.reinforce.num_rollouts_per_prompt)
    rows_a_batch = int(config.model.reinforce.rollout_micro_batch_size) * group
    files = rollout_files(folder)
    steps = []
    for line in read_metrics(folder / "metrics.jsonl"):
        number = line["step"]
        if number < 2 or number not in files or f"timers/{TRAINING}" not in line:
            continue
        lengths = [row.response_length for row in read_rows(files[number])]
        batches = [
            lengths[start : start + rows_a_batch] for start in range(0, len(lengths), rows_a_batch)
        ]
        prompt_tokens = line["train/prompt_lengths"] * len(lengths) / group
        seconds = {phase: line[f"timers/{phase}"] for phase in PHASES if f"timers/{phase}" in line}
        steps.append(MeasuredStep(seconds, floors.StepTokens(prompt_tokens, group, batches)))
    if not steps:
        raise ValueError(
            f"{folder}: expected at least two steps in metrics.jsonl with their files in rollouts/"
        )
    return Path(config.pretrained_checkpoint.restore_from_path), steps


def steps_made_here(threads: int) -> tuple[Path, list[MeasuredStep]]:
    """SmolLM2, and one step of it after another that does not count.

    Raises:
        SideFailed: the trainer did not run.
    """
    model = prepare_smollm2(ROOT / DEFAULT_FOLDER)
    asked = workload.Workload(
        model=str(model),
        prompts=make_prompts(load_tokenizer(model), 2, PROMPTS, PROMPT_TOKENS),
        warm_up_steps=1,
        group=GROUP,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=RESPONSE_TOKENS,
        beta=0.05,
        lr=1e-6,
        seed=1,
        threads=threads,
        batch=PROMPTS * GROUP,
        own_batch=None,  # as shipped
        overrides=[],
    )
    step = run_side(Path(sys.executable), OURS, asked, SIDE_SECONDS).steps[-1]
    seconds = {
        GENERATE: step.phases[workload.GENERATION],
        LOG_PROBS: step.phases[workload.LOG_PROBS],
        REFERENCE: step.phases[workload.REFERENCE],
        TRAINING: step.phases[workload.TRAINING] + step.phases[workload.OPTIMIZER],
    }
    lengths = [sample.response_tokens for sample in step.samples]
    tokens = floors.StepTokens(PROMPTS * PROMPT_TOKENS, GROUP, [lengths])
    # A phase that does not take place is not quite 0.
    had = {phase: value for phase, value in seconds.items() if value >= 0.01}
    return model, [MeasuredStep(had, tokens)]


def show(machine: floors.Machine, threads: int, rows: list[Row]) -> None:
    console = Console(width=119)
    rates = f"{machine.bandwidth / 1e9:.1f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s in fp32"
    console.print(f"{rates}, {threads} threads, load {os.getloadavg()[0]:.1f}", highlight=False)
    table = Table(title="seconds of a step, medians; each prompt computed once, or once a sample")
    table.add_column("phase")
    for name in ("measured", "least, once", "times that", "least, once a sample", "times that"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row.seconds:.2f}"]
        for least in (row.floor.shared, row.floor.repeated):
            cells += [f"{least:.3f}", f"{row.seconds / least:.1f}"]
        table.add_row(row.name, *cells, end_section=row is rows[-2])
    console.print(table)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a side is ended too
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, nargs="?", help="folder of a run, exp_manager.explicit_log_dir"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="that torch uses (all cores)",
    )
    args = parser.parse_args()
    try:
        model, steps = steps_of_run(args.run) if args.run else steps_made_here(args.threads)
        parts = parts_of(Architecture.from_folder(model))
    except (ValueError, OSError, SideFailed, ReinforceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    machine = rates.measure(args.threads)
    show(machine, args.threads, table_rows(machine, parts, steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
