"""The demo: aligns SmolLM2-135M-Instruct on this machine's CPU against a reward model on a real PyTriton server."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from reinforce_rl.errors import ConfigError
from reinforce_rl.utils.places import IS_CLONE, PACKAGE, shipped

OUT = PACKAGE.parent / "results" / "demo" if IS_CLONE else Path("results/demo")


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides of `train`, such as model.seed=1")
    ] = None,
    out: Annotated[Path, typer.Option(help="the run's folder; an old one goes")] = OUT,
) -> None:
    """Align SmolLM2-135M-Instruct on this machine's CPU against a reward model on a real PyTriton server.

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
        print(run_summary(out, {name: place for name, place in places.items() if place.exists()}))
        print(f"  took {(time.monotonic() - started) / 60:.1f} minutes")
    return code


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
