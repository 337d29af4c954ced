"""The demo: SmolLM2-135M-Instruct learns to answer in an asked form on this machine's CPU; a real server scores it."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reinforce_rl.errors import ConfigError
from reinforce_rl.utils.places import IS_CLONE, PACKAGE, shipped

if TYPE_CHECKING:
    from reinforce_rl.monitoring.records import RolloutRow

OUT = PACKAGE.parent / "results" / "demo" if IS_CLONE else Path("results/demo")


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides of `train`, such as model.seed=1")
    ] = None,
    out: Annotated[Path, typer.Option(help="the run's folder; an old one goes")] = OUT,
) -> None:
    """Teach SmolLM2-135M-Instruct to answer in an asked form, on this machine's CPU against a real reward server.

    DEMO_STEPS=N in the environment makes it shorter or longer.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: no hub
    raise typer.Exit(run(out, [*steps_override(os.environ.get("DEMO_STEPS", "")), *(overrides or [])]))


def run(out: Path, overrides: list[str]) -> int:
    """Prepare the model, run server and actor, and say what came of it; the exit code."""
    from reinforce_rl.launch.local import launch, make_plan
    from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2
    from reinforce_rl.monitoring.report import run_summary

    started, data = time.monotonic(), shipped("demo", "examples/demo")
    model = prepare_smollm2(DEFAULT_FOLDER)
    remove_old_run(out)
    plan = make_plan(
        run_dir=out,
        server_args=[
            "--config-name=demo_server",
            f"reward_model.restore_from_path={model}",
            f"reward_model.head_path={data / 'reward_head' / 'head.safetensors'}",
        ],
        actor_args=[
            "--config-name=demo_actor",
            f"pretrained_checkpoint.restore_from_path={model}",
            f"model.data.data_prefix.train={data / 'prompts_train.jsonl'}",
            f"model.data.data_prefix.validation={data / 'prompts_validation.jsonl'}",
            f"exp_manager.explicit_log_dir={out}",
            *overrides,
        ],
    )
    code = launch(plan, say=lambda text: print(f"[demo] {text}", flush=True))
    if code == 0:
        places = {
            "report": out / "report.html",
            "samples": out / "rollouts",
            "checkpoint": out / "checkpoints",
            "trained model": out / "hf",
            "server's log": plan.server_log,
        }
        print()
        print_answers(out, data / "prompts_validation.jsonl")
        print(run_summary(out, {name: place for name, place in places.items() if place.exists()}))
        print(f"  took {(time.monotonic() - started) / 60:.1f} minutes")
    return code


def print_answers(out: Path, asked: Path) -> None:
    """Print how many held-out prompts were answered as asked, before and after, and the answers to three of them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from reinforce_rl.monitoring.run_folder import RunFolder
    from reinforce_rl.rewards.functions import instructions
    from reinforce_rl.utils.files import read_json_lines

    def follows(row: RolloutRow, record: Mapping[str, Any]) -> bool:
        return instructions(row.prompt, row.response, record, partial=False) == 1.0

    validations = RunFolder(out).validations
    if validations is None:
        return
    records, last = list(read_json_lines(asked)), {row.prompt_id: row for row in validations[1]}
    pairs = [
        (record, row, last[row.prompt_id])
        for row in validations[0]
        for record in records
        if row.prompt_id in last and record["prompt"] in row.prompt
    ]
    if not pairs:  # other prompts were given
        return
    before = [follows(row, record) for record, row, _ in pairs]
    after = [follows(row, record) for record, _, row in pairs]
    shares = [statistics.fmean(found) for found in (before, after)]
    errors = [math.sqrt(share * (1 - share) / len(pairs)) for share in shares]
    texts = [f"{share:.1%} ± {error:.1%}" for share, error in zip(shares, errors, strict=True)]
    print(f"Held-out prompts answered exactly as asked: {texts[0]} before, {texts[1]} after, of {len(pairs)}.")
    table = Table("asked", "before", "after", title="The first three of them", show_lines=True)
    for (record, *rows), *marks in list(zip(pairs, before, after, strict=True))[:3]:
        answers = [f"{'✓' if mark else '✗'} {row.response}" for row, mark in zip(rows, marks, strict=True)]
        table.add_row(*map(Text, (record["prompt"], *answers)))
    Console(highlight=False).print(table)


def remove_old_run(out: Path) -> None:
    """Make room for a new run.

    Raises:
        ConfigError: the folder holds something that is not a run; it is left alone.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / "config.yaml").is_file() and not (out / "logs").is_dir():
        raise ConfigError([f"--out is {out}, which is not empty and holds no earlier run; name another folder"])
    shutil.rmtree(out, ignore_errors=True)


def steps_override(text: str) -> list[str]:
    """The override that DEMO_STEPS stands for; none where it is unset or empty.

    Raises:
        ConfigError: not a whole number above 0.
    """
    if not text:
        return []
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError([f"DEMO_STEPS is {text!r}; expected a whole number above 0"])
    steps = int(text)
    return [
        f"trainer.reinforce.max_steps={steps}",
        f"trainer.reinforce.val_check_interval={steps}",
        f"trainer.reinforce.save_interval={steps}",
    ]
