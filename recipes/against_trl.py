"""Compare learning curves with TRL's RLOOTrainer on the demo's task, at equal samples and settings.

python recipes/against_trl.py [--seeds 1,2,3] [--out results/recipes/against_trl] \
    [OVERRIDES of against_trl.yaml]

Start it in the repository's root. TRL gets its own environment, .venv-peers. The sides take turns
in separate processes, and finished runs are not made again. OUT/curves.html shows both curves: the
mean over seeds of the rewards of training samples, and a band of one standard error.
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
    model = Path(trl_settings(args.overrides)["model"])
    if not model.is_dir():
        prepare_smollm2(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    curves: dict[str, list[Curve]] = {name: [] for name in COLOURS}
    for seed in args.seeds.split(","):
        settings = [*args.overrides, f"model.seed={seed}"]
        own_curve = own_side(args.out / f"own_{seed}", settings)
        trl_curve = trl_side(args.out / f"trl_{seed}", settings)
        curves["reinforce_rl"].append(own_curve)
        curves["TRL"].append(trl_curve)
    (args.out / "curves.json").write_text(json.dumps(curves), encoding="utf-8")
    page = args.out / "curves.html"
    draw(curves, page)
    for name, runs in curves.items():
        by_seed = []
        for curve in runs:
            last_steps = curve["rewards_accuracy"][-10:]
            accuracy = statistics.fmean(last_steps)
            by_seed.append(f"{accuracy:.3f}")
        accuracies = ", ".join(by_seed)
        print(f"{name}: accuracy of the last steps' samples, by seed: {accuracies}")
    print(page)


def own_side(folder: Path, overrides: Sequence[str]) -> Curve:
    """Train with this project; continues a stopped run."""
    command = [sys.executable, "-m", "reinforce_rl", "train"]
    command += ["--config-dir", str(HERE), "--config-name", NAME]
    command += [f"exp_manager.explicit_log_dir={folder}", *overrides]
    subprocess.run(command, check=True, timeout=SECONDS)
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    curve = {}
    for name in METRICS:
        key = f"train/{name}"
        curve[name] = [line[key] for line in lines if key in line]
    return curve


def trl_side(folder: Path, overrides: Sequence[str]) -> Curve:
    folder.mkdir(parents=True, exist_ok=True)
    curve = folder / "curve.json"
    if not curve.exists():
        settings = folder / "settings.json"
        settings.write_text(json.dumps(trl_settings(overrides)), encoding="utf-8")
        python = ROOT / ".venv-peers" / "bin" / "python"
        command = [python, HERE / "trl_side.py", settings, curve]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for the reward function
        subprocess.run(command, check=True, timeout=SECONDS, env=environment)
    return json.loads(curve.read_text(encoding="utf-8"))


def trl_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the recipe's settings by TRL's names."""
    search_path = f"hydra.searchpath=[file://{CONF_FOLDER}]"
    cfg = compose(NAME, [search_path, *overrides], HERE)
    reinforce = cfg.trainer.reinforce
    rollouts = cfg.model.reinforce
    sampling = rollouts.sampling_params
    lengths = rollouts.length_params
    optim = cfg.model.optim
    beta1, beta2 = optim.betas
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
        "temperature": sampling.temperature,
        "max_completion_length": lengths.max_length,
        "learning_rate": optim.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": optim.sched.warmup_steps,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": reinforce.gradient_clip_val,
        "seed": cfg.model.seed,
    }
    model = Path(cfg.pretrained_checkpoint.restore_from_path)
    prompts = Path(cfg.model.data.data_prefix.train)
    return {
        "model": str(model.resolve()),
        "prompts": str(prompts.resolve()),
        "args": args,
    }


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Write a page with a chart for each metric."""
    from plotly.subplots import make_subplots

    titles = list(METRICS.values())
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles)
    for column, metric in enumerate(METRICS, 1):
        for name, runs in curves.items():
            means = []
            upper = []
            lower = []
            series = [curve[metric] for curve in runs]
            for values in zip(*series, strict=True):
                mean = statistics.fmean(values)
                error = 0.0
                if len(values) > 1:
                    deviation = statistics.stdev(values)
                    error = deviation / len(values) ** 0.5
                means.append(mean)
                upper.append(mean + error)
                lower.append(mean - error)
            num_steps = len(means)
            steps = list(range(1, num_steps + 1))
            colour = COLOURS[name]
            common = {"legendgroup": name, "mode": "lines", "row": 1, "col": column}
            figure.add_scatter(
                x=steps + steps[::-1],
                y=upper + lower[::-1],
                fill="toself",
                fillcolor=f"rgba({colour}, 0.2)",
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                **common,
            )
            figure.add_scatter(
                x=steps,
                y=means,
                name=name,
                line={"color": f"rgb({colour})"},
                showlegend=column == 1,
                **common,
            )
        figure.update_xaxes(title="step", row=1, col=column)
    figure.update_layout(title="The demo's task, training samples: mean of the seeds")
    figure.write_html(path)


if __name__ == "__main__":
    main()
