"""The published algorithms of `algorithm=NAME`: files, documentation and two steps of each."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from helpers.models import ROOT
from helpers.tiny_run import compose, rollouts_of, run, tiny_overrides
from omegaconf import OmegaConf

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.config.actor import ReinforceConfig, TrainConfig
from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.load import load_config

RL = "trainer.reinforce"
FOLDER = CONF_FOLDER / "algorithm"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")

# The names in the page's table of presets, by key.
KL_NAMES = {"k1": "k1", "abs(k1)": "absolute_k1", "k3": "k3"}
AGGREGATIONS = {
    "sum over tokens, mean over sequences": "sequence_sum",
    "mean over tokens": "token_mean",
    "mean over tokens, then over sequences": "sequence_mean",
    "sum / max_length": "fixed_length",
}

every_preset = pytest.mark.parametrize("preset", PRESETS)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> list[str]:
    """Overrides with which only the preset decides whether a configuration is valid."""
    overrides = tiny_overrides(tmp_path_factory.mktemp("run"))
    return [override for override in overrides if "initial_policy_kl_penalty" not in override]


def config_of(right: list[str], *overrides: str) -> TrainConfig:
    return load_config(compose(*right, *overrides))


def table(heading: str) -> dict[str, list[str]]:
    """Return the first table below a heading: the other cells of each row, by its first cell."""
    rows = re.search(rf"^## {heading}\n.*?((?:^\|[^\n]*\n)+)", PAGE, re.MULTILINE | re.DOTALL)
    assert rows is not None, heading
    lines = rows[1].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {re.findall(r"`(\w+)`", row[0])[0]: row[1:] for row in cells}


@every_preset
def test_it_sets_keys_of_the_algorithm_and_passes_the_checks(preset, right):
    text = (FOLDER / f"{preset}.yaml").read_text(encoding="utf-8")
    settings = OmegaConf.to_container(OmegaConf.create(text))
    assert text.startswith("# @package trainer.reinforce\n")
    assert isinstance(settings, dict)
    assert settings
    assert settings.keys() <= ReinforceConfig.model_fields.keys()
    loaded = vars(config_of(right, f"algorithm={preset}").trainer.reinforce)
    assert {key: loaded[str(key)] for key in settings} == settings


def test_the_default_is_rloo(right):
    assert config_of(right, "algorithm=rloo") == config_of(right)


@every_preset
def test_a_key_given_besides_it_wins(preset, right):
    overrides = [f"{RL}.num_rollouts_per_prompt=3", f"{RL}.initial_policy_kl_penalty=0.125"]
    settings = config_of(right, f"algorithm={preset}").trainer.reinforce
    expected = settings.model_copy(
        update={"num_rollouts_per_prompt": 3, "initial_policy_kl_penalty": 0.125}
    )
    assert settings != expected
    assert config_of(right, *overrides, f"algorithm={preset}").trainer.reinforce == expected
    assert config_of(right, f"algorithm={preset}", *overrides).trainer.reinforce == expected


def test_the_comment_of_the_configuration_names_them_all():
    text = (CONF_FOLDER / "train_reinforce_actor.yaml").read_text(encoding="utf-8")
    comment = re.search(r"presets of conf/algorithm:((?:.*\n\s*#)?[^#\n]*)", text)
    assert comment is not None
    assert sorted(re.findall(r"\w+", comment[1])) == PRESETS


def test_the_page_has_a_row_for_each():
    assert sorted(table("Presets")) == PRESETS


@every_preset
def test_the_page_says_what_it_sets(preset, right):
    settings = config_of(right, f"algorithm={preset}").trainer.reinforce
    rows = table("Presets")
    cells = rows[preset]
    for column, cell in enumerate(cells):
        if like := re.fullmatch(r"as `(\w+)`", cell):
            cells[column] = rows[like[1]][column]
    _, kl, ratio, loss, samples = cells
    assert settings.num_rollouts_per_prompt == int(samples)
    beta = re.search(r"β ([\d.]+)", kl)
    default = 0.0 if kl == "none" else ReinforceConfig().initial_policy_kl_penalty
    assert settings.initial_policy_kl_penalty == (float(beta[1]) if beta else default)
    if kl != "none":
        estimator = re.search(r"abs\(k1\)|k\d", kl)
        assert estimator is not None
        assert settings.kl_estimator_used == KL_NAMES[estimator[0]]
        assert settings.kl_reduction == ("mean" if "mean over tokens" in kl else "sum")
        assert settings.kl_placement == ("loss" if "in the loss" in kl else "reward")
    assert settings.loss_aggregation == AGGREGATIONS[loss]
    name, _, clip = ratio.partition(", ")
    assert settings.importance_ratio == name
    if clip:
        assert settings.ratio_clip_low == settings.ratio_clip_high == float(clip)


@pytest.mark.more
@every_preset
def test_it_trains(preset, tmp_path: Path, mesh):
    """Most responses end in time, since one of the presets drops the others."""
    sizes = "model.reinforce.length_params.max_length=13", "model.micro_batch_size=16"
    lines = run(tmp_path, mesh, f"algorithm={preset}", *sizes)
    assert [line["step"] for line in lines] == [1, 2]
    settings = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{preset}.yaml"))
    assert isinstance(settings, dict)
    # Undefined where a prompt has one sample.
    of_groups = ["train/reward_group_std", "train/fraction_of_groups_with_zero_std"]
    for line in lines:
        undefined = [
            name for name, value in line.items() if value is None or not math.isfinite(value)
        ]
        assert undefined == (of_groups if settings.get("num_rollouts_per_prompt") == 1 else [])
        assert line["train/grad_norm"] > 0 == line["train/skipped_step"]
    assert any(row["advantage"] for row in rollouts_of(tmp_path, 2))


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_every_estimator_of_advantages_can_be_chosen(estimator, right):
    settings = config_of(right, f"{RL}.advantage_estimator={estimator}").trainer.reinforce
    assert settings.advantage_estimator == estimator


def test_the_page_has_a_row_for_every_estimator_of_advantages():
    assert table("Baselines and advantages").keys() == ADVANTAGE_ESTIMATORS.keys()
