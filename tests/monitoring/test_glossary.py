"""The table of metrics against what runs write: nothing undocumented, no dead entry."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers.rewards import FunctionReward
from helpers.tiny_run import PROMPT_TOKENS, SOME_ALIKE, odd_share, run, three_letters, write_prompts

from reinforce_rl.monitoring.glossary import METRICS, metric_of
from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.monitoring.stragglers import RankSeconds, slowest_of_phases, timing_metrics
from reinforce_rl.reward_model.objectives import Ranking, Regression
from reinforce_rl.reward_model.train_full import RewardModelMonitor

RL = "trainer.reinforce"
OFF_POLICY = (
    f"{RL}.reinforce_epochs=2",
    f"{RL}.importance_ratio=token",
    f"{RL}.generator_correction=token_mask",
    f"{RL}.entropy_bonus=0.01",
    f"{RL}.max_steps=1",
)
FILTERED = (f"{RL}.dynamic_filtering=true", f"{RL}.max_steps=1")


class TwoSources(FunctionReward):
    def infer_rm(self, request):
        future = super().infer_rm(request)
        values = future.rewards.values
        rewards = dataclasses.replace(future.rewards, by_source={"length": values})
        return dataclasses.replace(future, rewards=rewards)


def names_in(path: Path) -> set[str]:
    return {name for line in read_metrics(path) for name in line} - {"step", "time"}


@pytest.fixture(scope="module")
def written(tmp_path_factory, mesh) -> set[str]:
    """All names that three small runs and the training of two reward models write."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "plain").mkdir()
    test = write_prompts(folder / "test.jsonl", three_letters(2))
    plain = (
        f"{RL}.max_steps=1",
        f"{RL}.val_check_interval=1",
        f"model.data.data_prefix.test={test}",
    )
    run(folder / "plain", mesh, *plain, rm=TwoSources(odd_share, PROMPT_TOKENS))
    for name, options in (("off_policy", OFF_POLICY), ("filtered", FILTERED)):
        (folder / name).mkdir()
        run(folder / name, mesh, *options, rm=SOME_ALIKE if name == "filtered" else odd_share)
    names = {name for path in folder.glob("*/run/metrics.jsonl") for name in names_in(path)}
    ranks = [RankSeconds("a", {"generate": 1.0}), RankSeconds("b", {"generate": 2.0})]
    names |= {f"timing/{name}" for name in timing_metrics(slowest_of_phases(ranks))}
    return names | reward_model_names(folder)


def reward_model_names(folder: Path) -> set[str]:
    from types import SimpleNamespace

    pair = SimpleNamespace(chosen=(1, 2), rejected=(1,))
    scores = torch.tensor([[[1.0], [0.5]], [[0.2], [0.7]]])
    ratings = [SimpleNamespace(ratings=(1.0,)), SimpleNamespace(ratings=(2.0,))]
    update = SimpleNamespace(grad_norm=1.0, lr=0.1, skipped=False)
    names = set()
    for objective, examples, values in (
        (Ranking(), [pair, pair], scores),
        (Regression(["honest"]), ratings, scores[:, :1]),
    ):
        objective_folder = folder / type(objective).__name__
        monitor = RewardModelMonitor(objective_folder, 1, 0, objective, enabled=True)
        _, sums = objective.loss(values, examples)  # type: ignore[arg-type]
        monitor.log_update(1, {"loss": 1.0, **sums}, update, 0.1)  # type: ignore[arg-type]
        monitor.log_evaluation(1, objective.evaluate(values, examples))  # type: ignore[arg-type]
        monitor.commit(1)
        names |= names_in(objective_folder / "metrics.jsonl")
    return names


def test_every_metric_is_documented(written):
    undocumented = {name for name in written if metric_of(name) is None}
    assert undocumented == set()


def test_no_entry_is_dead(written):
    # See tests/rollout/test_disaggregated.py, test_finished_first.py and test_episode_runs.py,
    # tests/monitoring/test_alerts.py.
    apart = {
        *(f"{kind}/turns" for kind in ("train", "val", "test")),
        "train/unscored_length_auc",
        "train/staleness",
        "timers/send_weights",
        "train/dropped_groups",
        "train/generator_logprob_diff_age_STEPS",
    }
    names = {known.name for name in written if (known := metric_of(name))}
    assert METRICS.keys() - names == apart


def test_every_entry_says_something():
    unexplained = [
        metric for metric in METRICS.values() if len(metric.meaning) < 10 or len(metric.look) < 1
    ]
    assert unexplained == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("val/math/rewards", "val/rewards"),
        ("val/math/rewards_length", "val/rewards_SOURCE"),
        ("timing/train_time/max", "timing/PHASE/max"),
        ("val/pearson_honest", "val/pearson_ATTRIBUTE"),
        ("train/rewards_", None),
        ("timers/lunch", None),
        ("train/actor_los", None),
        ("val/math/secret", None),
        ("step", None),
    ],
)
def test_names_are_found(name, entry):
    metric = metric_of(name)
    assert (metric and metric.name) == entry
