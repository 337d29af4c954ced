"""Learning curves of this project and of TRL's RLOOTrainer on the demo's task, at equal samples and settings.

python recipes/against_trl.py [--seeds 1,2,3] [--out results/recipes/against_trl] [OVERRIDES of against_trl.yaml]

Start it in the repository's root. TRL gets an environment of its own, .venv-peers. The sides take turns, each in a
process of its own, and a run that is there already is not made again. At the end OUT/curves.html has both curves: the
mean of the seeds' rewards on training samples, and a band of one standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.config.compose import CONF_FOLDER, compose
from reinforce_rl.launch.smollm2 import prepare_smollm2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAME = "against_trl"
METRICS = {"rewards": "reward, of at most 2", "rewards_accuracy": "answered exactly as asked"}
COLOURS = {"reinforce_rl": "31, 119, 180", "TRL": "214, 39, 40"}
SECONDS = 24 * 3600  # for one run

Curve = dict[str, list[float]]  # of each metric, a number a step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3", help="separated by commas (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/recipes") / NAME)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    make_environment = [
        sys.executable,
        ROOT / "tools/make_environment.py",
        "peers",
        ROOT / ".venv-peers",
    ]
    subprocess.run(make_environment, check=True, timeout=1200)
    if not Path(trl_settings(args.overrides)["model"]).is_dir():
        prepare_smollm2(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    curves: dict[str, list[Curve]] = {name: [] for name in COLOURS}
    for seed in args.seeds.split(","):
        settings = [*args.overrides, f"model.seed={seed}"]
        curves["reinforce_rl"].append(own_side(args.out / f"own_{seed}", settings))
        curves["TRL"].append(trl_side(args.out / f"trl_{seed}", settings))
    (args.out / "curves.json").write_text(json.dumps(curves), encoding="utf-8")
    draw(curves, args.out / "curves.html")
    for name, runs in curves.items():
        last = [statistics.fmean(curve["rewards_accuracy"][-10:]) for curve in runs]
        print(
            f"{name}: accuracy of the last steps' samples, by seed: {', '.join(f'{value:.3f}' for value in last)}"
        )
    print(args.out / "curves.html")


def own_side(folder: Path, overrides: Sequence[str]) -> Curve:
    """Train here; a run that was stopped goes on."""
    command = [
        sys.executable,
        "-m",
        "reinforce_rl",
        "train",
        "--config-dir",
        str(HERE),
        "--config-name",
        NAME,
    ]
    subprocess.run(
        [*command, f"exp_manager.explicit_log_dir={folder}", *overrides],
        check=True,
        timeout=SECONDS,
    )
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {
        name: [line[f"train/{name}"] for line in lines if f"train/{name}" in line]
        for name in METRICS
    }


def trl_side(folder: Path, overrides: Sequence[str]) -> Curve:
    folder.mkdir(parents=True, exist_ok=True)
    curve = folder / "curve.json"
    if not curve.exists():
        settings = folder / "settings.json"
        settings.write_text(json.dumps(trl_settings(overrides)), encoding="utf-8")
        python = ROOT / ".venv-peers" / "bin" / "python"
        command = [str(python), str(HERE / "trl_side.py"), str(settings), str(curve)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for the reward function
        subprocess.run(command, check=True, timeout=SECONDS, env=environment)
    return json.loads(curve.read_text(encoding="utf-8"))


def trl_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the recipe's settings by TRL's names."""
    cfg = compose(NAME, [f"hydra.searchpath=[file://{CONF_FOLDER}]", *overrides], HERE)
    reinforce = cfg.trainer.reinforce
    rollouts = cfg.model.reinforce
    optim = cfg.model.optim
    group = reinforce.num_rollouts_per_prompt
    samples = rollouts.num_rollout_samples * group
    # a whole batch at once takes TRL 8 GB
    micro_batch = math.gcd(samples, cfg.model.micro_batch_size)
    args = {
        "max_steps": reinforce.max_steps,
        "num_generations": group,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch,
        "beta": reinforce.initial_policy_kl_penalty,
        "temperature": rollouts.sampling_params.temperature,
        "max_completion_length": rollouts.length_params.max_length,
        "learning_rate": optim.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": optim.sched.warmup_steps,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "weight_decay": optim.weight_decay,
        "max_grad_norm": reinforce.gradient_clip_val,
        "seed": cfg.model.seed,
    }
    return {
        "model": str(Path(cfg.pretrained_checkpoint.restore_from_path).resolve()),
        "prompts": str(Path(cfg.model.data.data_prefix.train).resolve()),
        "args": args,
    }


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Write a page with a chart for each metric."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(METRICS), subplot_titles=list(METRICS.values()))
    for column, metric in enumerate(METRICS, 1):
        for name, runs in curves.items():
            by_step = list(zip(*(curve[metric] for curve in runs), strict=True))
            means = [statistics.fmean(values) for values in by_step]
            errors = [
                statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
                for values in by_step
            ]
            steps = list(range(1, len(means) + 1))
            band = [m + e for m, e in zip(means, errors, strict=True)]
            band += [m - e for m, e in zip(means[::-1], errors[::-1], strict=True)]
            colour = COLOURS[name]
            common = {"legendgroup": name, "mode": "lines"}
            area = {
                "fill": "toself",
                "fillcolor": f"rgba({colour}, 0.2)",
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
            figure.add_scatter(
                x=steps + steps[::-1], y=band, showlegend=False, row=1, col=column, **area, **common
            )
            line = {"name": name, "line": {"color": f"rgb({colour})"}, "showlegend": column == 1}
            figure.add_scatter(x=steps, y=means, row=1, col=column, **line, **common)
        figure.update_xaxes(title="step", row=1, col=column)
    figure.update_layout(title="The demo's task, training samples: mean of the seeds")
    figure.write_html(path)


if __name__ == "__main__":
    main()
