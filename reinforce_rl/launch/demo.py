"""The demo trains SmolLM2-135M-Instruct on this machine's CPU, with a real reward server.

The model learns to answer in a requested form.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.paths import IS_CLONE, PACKAGE, shipped

OUT = PACKAGE.parent / "results" / "demo" if IS_CLONE else Path("results/demo")


def demo(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of `train`")] = None,
    out: Annotated[Path, typer.Option(help="the run's folder; an old one goes")] = OUT,
) -> None:
    """Teach SmolLM2-135M-Instruct to answer in a given format, on this machine's CPU against a real
    reward server.

    DEMO_STEPS=N in the environment makes it shorter or longer.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # set before any library reads it
    from reinforce_rl.launch.local import launch, make_plan
    from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2
    from reinforce_rl.monitoring.report import run_summary

    overrides = [*steps_override(os.environ.get("DEMO_STEPS", "")), *(overrides or [])]
    started = time.monotonic()
    data = shipped("demo", "examples/demo")
    model = prepare_smollm2(DEFAULT_FOLDER)
    if (
        out.is_dir()
        and any(out.iterdir())
        and not (out / "config.yaml").is_file()
        and not (out / "logs").is_dir()
    ):
        raise ConfigError(
            [
                Fault(
                    f"--out is {out}, which is not empty and holds no earlier run; name another "
                    "folder",
                    key="demo.folder.not_a_run",
                )
            ]
        )
    shutil.rmtree(out, ignore_errors=True)
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
    if code := launch(plan, say=lambda text: print(f"[demo] {text}", flush=True)):
        raise typer.Exit(code)
    names = {
        "report": "report.html",
        "samples": "rollouts",
        "checkpoint": "checkpoints",
        "trained model": "hf",
    }
    places = {name: out / place for name, place in names.items()} | {
        "server's log": plan.server_log
    }
    print()
    print_answers(out, data / "prompts_validation.jsonl")
    print(run_summary(out, {name: place for name, place in places.items() if place.exists()}))
    print(f"  took {(time.monotonic() - started) / 60:.1f} minutes")


def print_answers(out: Path, asked: Path) -> None:
    """Print how many held-out prompts were answered exactly as asked, and three examples.

    Both compare answers before and after training.
    """
    from rich.table import Table
    from rich.text import Text

    from reinforce_rl.monitoring.run_folder import RunFolder
    from reinforce_rl.rewards.functions import instructions
    from reinforce_rl.utils.console import Console
    from reinforce_rl.utils.files import read_json_lines
    from reinforce_rl.utils.statistics import paired

    validations = RunFolder(out).validations
    if validations is None:
        return
    records = list(read_json_lines(asked))
    last = {row.prompt_id: row for row in validations[1]}
    answers = [
        (record, row.response, last[row.prompt_id].response)
        for row in validations[0]
        for record in records
        if row.prompt_id in last and record["prompt"] in row.prompt
    ]
    if not answers:  # the run had other prompts
        return
    marks = [
        [instructions("", text, record, partial=False) == 1.0 for text in pair]
        for record, *pair in answers
    ]
    before, after = (dict(enumerate(map(float, column))) for column in zip(*marks, strict=True))
    print(f"Held-out prompts answered exactly as asked: {paired(before, after).sentence('.1%')}.")
    table = Table("asked", "before", "after", title="The first three of them", show_lines=True)
    for (record, *pair), good in list(zip(answers, marks, strict=True))[:3]:
        cells = [
            f"{'✓' if is_good else '✗'} {text}" for text, is_good in zip(pair, good, strict=True)
        ]
        table.add_row(*map(Text, (record["prompt"], *cells)))
    Console(highlight=False).print(table)


def steps_override(text: str) -> list[str]:
    """Return the overrides for DEMO_STEPS; none if it is empty.

    Raises ConfigError if it is not a whole number above 0.
    """
    if not text:
        return []
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            [
                Fault(
                    f"DEMO_STEPS is {text!r}; expected a whole number above 0",
                    key="demo.steps.invalid",
                )
            ]
        )
    return [
        f"trainer.reinforce.{key}={int(text)}"
        for key in ("max_steps", "val_check_interval", "save_interval")
    ]
