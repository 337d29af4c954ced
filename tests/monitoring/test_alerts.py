"""Each rule of the alerts on a faulty and a healthy series, and its effect on a run."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import check_error, check_fault
from helpers.tiny_run import metrics_of, odd_share, run, tiny_config, tiny_trainer, weights
from omegaconf import OmegaConf

from reinforce_rl.config.load import load_config
from reinforce_rl.config.monitoring import RulesConfig
from reinforce_rl.errors import EXIT_ALERT, AlertStop, ConfigError
from reinforce_rl.monitoring.alerts import GAP_LIMITS, QUIET, RULES, AlertRules
from reinforce_rl.monitoring.loggers import JsonlLogger, Loggers
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.monitoring.responses import (
    length_reward_correlation,
    repeated_texts,
    sample_metrics,
    text_metrics,
    unscored_length_auc,
)
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.runtime.status import StatusFile, read_status

RL = "trainer.reinforce"
START = 20  # the first step with a fault
PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def healthy(steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """A run that learns, with the noise of 32 samples a step."""
    draw = random.Random(seed).gauss
    for step in range(1, steps + 1):
        done = min(1.0, step / 100)
        numbers = {
            "rewards": 1.5 * done + draw(0, 0.18),
            "reward_std": 1 + draw(0, 0.12),
            "fraction_of_samples_scored": 1.0,
            "fraction_of_groups_with_zero_std": 0.1,
            "fraction_of_samples_properly_ended": 0.95 + draw(0, 0.02),
            "response_lengths": 100 * (1 + 0.1 * done) + draw(0, 5),
            "init_policy_kl": 8 * done**2 * (1 + draw(0, 0.1)),
            "entropy_sampled": 2 - done + draw(0, 0.05),
            "turns": 2.2,
            "repetition": abs(draw(0.02, 0.01)),
            "compression": 0.8 + draw(0, 0.02),
            "length_reward_correlation": draw(0, 0.2),
            "prompts_repeated": 0.0,
            "generator_logprob_diff": 0.002 * math.exp(draw(0, 0.3)),
            "grad_norm": math.exp(draw(0, 0.3)),
            "actor_loss": draw(0, 1),
            "skipped_step": 0.0,
        }
        line = {f"train/{name}": value for name, value in numbers.items()}
        line |= {
            "timing/x/max": 1.1,
            "timing/x/median": 1.0,
            "timing/x/rank": 1,
            "timers/step_time": 2.0,
        }
        if step % 10 == 0:
            line["val/rewards"] = 1.4 * done + draw(0, 0.05)
        yield {"step": step, **line}


# (steps since the fault began, from 0), a line
Change = Callable[[int, dict[str, Any]], Mapping[str, Any]]


def becomes(**values: float | None) -> Change:
    return lambda _, line: {f"train/{name}": value for name, value in values.items()}


# The fault, and the steps within which its rule speaks.
FAULTS: list[tuple[str, Change, int]] = [
    ("not_finite", becomes(actor_loss=None), 1),
    ("not_finite", becomes(rewards=None, fraction_of_samples_scored=0.0), 1),
    ("skipped", becomes(skipped_step=1.0), 1),
    ("unscored", becomes(fraction_of_samples_scored=0.97), 1),
    ("unscored_length", becomes(fraction_of_samples_scored=0.97, unscored_length_auc=0.95), 3),
    ("constant_reward", becomes(rewards=0.5, reward_std=1e-9), 3),
    ("zero_reward_std", becomes(fraction_of_groups_with_zero_std=1.0), 3),
    (
        "zero_reward_std",
        becomes(fraction_of_groups_with_zero_std=0.96, rewards=0.2, reward_std=0.4),
        3,
    ),
    (
        "solved",
        becomes(fraction_of_groups_with_zero_std=0.96, rewards=3.0, reward_std=0.4),
        3,
    ),
    ("zero_gradient", becomes(grad_norm=0.0), 2),
    ("reward_jump", becomes(rewards=4.0), 1),
    ("reward_jump", becomes(rewards=0.0, reward_std=0.0), 1),
    ("reward_jump", becomes(reward_std=9.0), 1),
    ("kl", lambda i, line: {"train/init_policy_kl": 1.5**i}, 10),
    ("entropy", lambda i, line: {"train/entropy_sampled": 0.1}, 2),
    ("entropy", lambda i, line: {"train/entropy_sampled": 5.0}, 2),
    ("entropy", lambda i, line: {"train/entropy": 2.0 if line["step"] < START else 0.1}, 2),
    (
        "truncated",
        lambda i, line: {"train/fraction_of_samples_properly_ended": 0.95 - 0.05 * i},
        10,
    ),
    (
        "length",
        lambda i, line: {"train/response_lengths": 100 + 10 * i, "train/rewards": 0.3 + 0.1 * i},
        9,
    ),
    (
        "length",
        lambda i, line: {
            "train/response_lengths": 100 + 10 * i,
            "train/rewards": 0.3 + 0.1 * i,
            "train/length_reward_correlation": 0.9,
        },
        6,
    ),
    ("turns", lambda i, line: {"train/turns": max(1.0, 2.2 - 0.4 * i)}, 8),
    ("repetition", lambda i, line: {"train/repetition": 0.1 * i}, 5),
    ("repetition", lambda i, line: {"train/compression": 0.8 - 0.1 * i}, 6),
    *[
        ("generator_logprob_diff", becomes(**{name: 1.01 * limit}), 2)
        for name, limit in GAP_LIMITS.items()
    ],
    ("generator_logprob_diff", lambda i, line: {"train/generator_logprob_diff": 0.002 * 1.5**i}, 8),
    ("gradient_spikes", lambda i, line: {"train/grad_norm": 30.0 if i % 2 == 0 else 1.0}, 7),
    (
        "overfitting",
        lambda i, line: (
            {"train/rewards": 0.3 + 0.1 * i}
            | ({"val/rewards": -0.6} if "val/rewards" in line else {})
        ),
        11,
    ),
    ("prompts_repeated", becomes(prompts_repeated=0.1), 1),
    ("straggler", lambda i, line: {"timing/x/max": 9.0}, 1),
]


def with_fault(change: Change, steps: int) -> Iterator[dict[str, Any]]:
    for line in healthy(steps):
        since = line["step"] - START
        is_of_start = change(0, line).keys() == {"train/entropy"}
        yield {**line, **(change(since, line) if since >= 0 or is_of_start else {})}


def said(alert_rules: AlertRules, lines: Iterator[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(alert.kind, alert.first) for line in lines for alert in alert_rules.look(line)]


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_is_met_with_silence(seed):
    assert said(AlertRules(), healthy(200, seed)) == []


@pytest.mark.parametrize(
    ("name", "change", "within"), FAULTS, ids=[f"{i}-{f[0]}" for i, f in enumerate(FAULTS)]
)
def test_each_fault_is_said_once_and_in_time(name, change, within):
    alert_rules = AlertRules()
    fired = said(alert_rules, with_fault(change, START + within + 20))
    steps = [step for kind, step in fired if kind == name]
    assert len(steps) == 1
    assert START <= steps[0] < START + within
    (alert,) = [alert for alert in alert_rules.alerts if alert.kind == name]
    assert f"docs/monitoring.md#{name}" in alert.text
    assert "nan" not in alert.text


def test_every_rule_has_a_fault_a_key_and_a_section():
    names = [rule.name for rule in RULES]
    assert names == list(RulesConfig.model_fields)
    assert {name for name, *_ in FAULTS} == set(names)
    sections = re.findall(r"^#### (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == names


def test_what_is_gone_for_a_while_may_be_said_again():
    alert_rules = AlertRules()
    steps = [20, 22, 22 + QUIET - 1, 50]
    lines = [line | {"train/skipped_step": float(line["step"] in steps)} for line in healthy(60)]
    expected = [("skipped", 20), ("skipped", 50)]
    assert said(alert_rules, iter(lines)) == expected
    expected = [
        (20, 26, 3),
        (50, 50, 1),
    ]
    spans = [(alert.first, alert.last, alert.count) for alert in alert_rules.alerts]
    assert spans == expected


def test_what_is_off_is_not_said():
    lines = [line | {"train/skipped_step": 1.0} for line in healthy(3)]
    assert said(AlertRules({"skipped": "off"}), iter(lines)) == []


def test_a_logprob_diff_of_older_weights_is_no_alert():
    assert (
        said(AlertRules(), with_fault(becomes(generator_logprob_diff=1.0, staleness=1.0), 30)) == []
    )


def test_a_step_costs_nothing_measurable():
    import time

    alert_rules = AlertRules()
    lines = list(healthy(300))
    began = time.process_time()
    said(alert_rules, iter(lines))
    assert (time.process_time() - began) / 300 < 0.01


def row(prompt: int, sample: int, response: str, reward: float = 0.0, text: str = "") -> RolloutRow:
    return RolloutRow(
        1,
        prompt,
        sample,
        text or f"prompt {prompt}",
        response,
        reward,
        "stop",
        len(response.split()),
    )


def test_metrics_of_texts():
    assert text_metrics(["a b c d", "e f g h"])["repetition"] == 0.0
    assert text_metrics(["a b c a b c a b c", "d e f"])["repetition"] == pytest.approx(4 / 8)
    assert text_metrics(["", "a"])["repetition"] == 0.0
    assert math.isnan(text_metrics([""])["compression"])
    codes = random.Random(0).choices(range(97, 123), k=400)
    prose = "".join(map(chr, codes))
    again = "very good " * 40
    assert text_metrics([again])["compression"] < 0.2 < text_metrics([prose])["compression"]
    assert text_metrics(["\ud800 lone"])["compression"] > 0


def test_failures_by_length():
    rows = [row(0, i, "a " * (i + 1), math.nan if i > 2 else 1.0) for i in range(4)]
    assert unscored_length_auc(rows) == 1.0
    assert unscored_length_auc([*rows, row(0, 4, "a", math.nan)]) == 3.5 / 6
    assert math.isnan(unscored_length_auc(rows[:3]))
    assert math.isnan(unscored_length_auc(rows[3:]))


def test_the_correlation_is_that_within_groups():
    rows = [row(p, i, "a " * (i + 1 + 9 * p), -5.0 * p + i) for p in (0, 1) for i in range(3)]
    assert length_reward_correlation(rows) == pytest.approx(1.0)
    assert math.isnan(length_reward_correlation(rows[:1]))
    assert math.isnan(length_reward_correlation([]))


def test_prompts_that_are_repeated():
    """It depends on the data alone, so a resumed run reports the same."""
    repeated = repeated_texts(
        ["once", "twice", "also held out", "twice"], ["held out", "also held out"]
    )
    assert repeated == {"twice", "also held out"}
    of = lambda *rows: sample_metrics(rows, repeated)["prompts_repeated"]  # noqa: E731
    once = row(0, 0, "x", text="once")
    first = row(0, 1, "x", text="once")
    second = row(1, 0, "x", text="other")
    assert of(once, first, second) == 0.0
    third = row(1, 0, "x", text="twice")
    fourth = row(1, 1, "x", text="twice")
    assert of(once, third, fourth) == 0.5
    assert of(row(2, 0, "x", text="also held out")) == 1.0
    assert sample_metrics([]) == {}


def test_it_speaks_in_terminal_status_metrics_and_loggers(tmp_path, capsys):
    calls = []

    class Listening(Loggers):
        def alert(self, title, text, step, level="WARN"):
            calls.append((title, step))

    status = StatusFile(tmp_path, enabled=True)
    loggers = Listening([JsonlLogger(tmp_path / "metrics.jsonl")])
    monitor = RunMonitor(tmp_path, loggers, TrainingProgress(9), status)
    for step in range(1, 10):
        monitor._log({"skipped_step": float(step in (3, 4)), "rewards": 1.0}, step, "train/")
        monitor.commit(step)
        monitor.commit(step)  # a stop ends them once more
        status_of_run = read_status(tmp_path)
        assert status_of_run
        expected = {"skipped"} if step in (3, 4) else set()
        assert set(status_of_run.alerts) == (expected)
    assert calls == [("skipped", 3)]
    assert (
        capsys.readouterr().out.count(
            "warning: step 3: the gradient was not finite: the optimizer step was"
        )
        == 1
    )
    lines = RunFolder(tmp_path).lines
    trained_steps = [line["step"] for line in lines]
    assert trained_steps == [*range(1, 10)]
    steps = [line["step"] for line in lines if line.get("alerts/skipped") == 1]
    assert steps == [3, 4]
    fired = [(alert.kind, alert.first, alert.last) for alert in RunFolder(tmp_path).alerts()]
    assert fired == [("skipped", 3, 4)]


def test_unknown_rules_are_faults():
    with pytest.raises(ConfigError) as raised:
        cfg = OmegaConf.create({"alerts": {"rules": {"lenght": "warn", "kl": "loud"}}})
        load_config(cfg)
    check_fault(raised.value.faults, "config.key.unknown", "alerts.rules.lenght")
    check_fault(raised.value.faults, "config.value.not_a_choice", "alerts.rules.kl", "'loud'")
    assert RulesConfig.model_validate({"kl": False}).kl == "off", "YAML's off"


class TestARun:
    STOPS = ("alerts.rules.constant_reward=stop", f"{RL}.max_epochs=5", f"{RL}.save_interval=0")

    def test_a_planted_failure_stops_it_once_its_state_is_saved(self, tmp_path, mesh, capsys):
        """The reward dies after two steps.

        The resumed run does not stop for the same reason again.
        """
        calls = []

        def dies(ids: list[int]) -> float:
            calls.append(1)
            return odd_share(ids) if len(calls) <= 2 * 16 else 0.0

        config = tiny_config(tmp_path, *self.STOPS)
        with pytest.raises(AlertStop) as raised, tiny_trainer(config, mesh, dies) as trainer:
            try:
                trainer.fit()
            finally:
                last = weights(trainer)
        assert raised.value.exit_code == EXIT_ALERT
        assert trainer.step == 5 < trainer.max_steps
        place = f"step 5 of {trainer.max_steps}"
        check_error(raised.value, "run.stop.by_alert", "constant_reward", place)
        assert "warning: step 5: the rewards of all samples" in capsys.readouterr().out
        steps = [line["step"] for line in metrics_of(tmp_path) if "alerts/constant_reward" in line]
        assert steps == [5]
        with tiny_trainer(config, mesh, lambda ids: 0.0) as trainer:
            assert trainer.step == 5
            for a, b in zip(weights(trainer), last, strict=True):
                assert (a == b).all()
            trainer.fit()
        assert metrics_of(tmp_path)[-1]["step"] == trainer.max_steps

    def test_a_run_logs_what_the_rules_read(self, tmp_path, mesh):
        lines = run(tmp_path, mesh, f"{RL}.max_steps=1")
        read = {
            "repetition",
            "compression",
            "entropy_sampled",
            "prompts_repeated",
            "length_reward_correlation",
        }
        metrics = {f"train/{name}" for name in read}
        assert metrics <= lines[-1].keys()
        assert 0 < lines[-1]["train/entropy_sampled"] < math.log(32) + 0.5
        assert json.dumps(lines[-1])


def steps_of(rule: str, lines: Iterable[Mapping[str, float | None]]) -> list[int]:
    """Return the steps, from 1, at which a rule fires on these lines."""
    alert_rules = AlertRules()
    base = {"rewards": 1.0, "reward_std": 0.5}
    spoken = []
    for step, values in enumerate(lines, 1):
        metrics = {**base, **values}.items()
        line = {"step": step} | {f"train/{name}": value for name, value in metrics}
        spoken += [step for alert in alert_rules.look(line) if alert.kind == rule]
    return spoken


class TestThresholds:
    """Where each rule begins and ends: docs/monitoring.md has the numbers."""

    @pytest.mark.parametrize(
        ("rule", "steps", "fault"),
        [
            ("constant_reward", 3, {"reward_std": 0.0}),
            ("zero_reward_std", 3, {"fraction_of_groups_with_zero_std": 1.0}),
            ("zero_gradient", 2, {"grad_norm": 0.0}),
            ("skipped", 1, {"skipped_step": 1.0}),
        ],
    )
    def test_a_rule_speaks_at_so_many_steps_in_a_row(self, rule, steps, fault):
        sound = [{}] * 3
        faults = [fault] * (steps - 1)
        assert steps_of(rule, [*sound, *faults, *sound]) == []
        assert steps_of(rule, [*sound, *[fault] * steps]) == [3 + steps]
        if steps > 1:  # steps that are not consecutive do not add up
            repeated = ([fault] * (steps - 1) + [{}]) * 4
            assert steps_of(rule, [*sound, *repeated]) == []

    @pytest.mark.parametrize(("sound", "said"), [(QUIET - 2, 1), (QUIET - 1, 2), (QUIET, 2)])
    def test_it_speaks_again_once_it_was_gone_for_so_many_steps(self, sound, said):
        """The last step with the fault and the next one are at least `QUIET` steps apart."""
        fault = {"skipped_step": 1.0}
        series = [{}, fault, *[{}] * sound, {}, fault]
        assert len(steps_of("skipped", series)) == said

    @pytest.mark.parametrize(
        ("rewards", "reward_std", "speaks"),
        [
            (1.0, 0.0, True),
            (1.0, 0.0099, True),  # 2 % of the std at first, 0.5
            (1.0, 0.0101, False),
            (1000.0, 0.099, True),  # 1e-4 of the reward: rounding of large rewards
            (1000.0, 0.101, False),
            (-1000.0, 0.099, True),
            (0.0, 1e-13, True),
        ],
    )
    def test_rewards_that_are_nearly_constant(self, rewards, reward_std, speaks):
        start = [{"rewards": rewards}] * 3
        fault = {"rewards": rewards, "reward_std": reward_std}
        series = [*start, *[fault] * 3]
        assert steps_of("constant_reward", series) == ([6] if speaks else [])

    def test_rewards_that_are_constant_from_the_first_step_on(self):
        """Before the third step there is no first std to compare with, nor later."""
        fault = {"rewards": 0.5, "reward_std": 0.0}
        assert steps_of("constant_reward", [fault] * 4) == [3]
        assert steps_of("constant_reward", [{"rewards": 0.0, "reward_std": 1e-13}] * 4) == [3]

    @pytest.mark.parametrize(("share", "speaks"), [(0.9, True), (0.89, False)])
    def test_groups_whose_rewards_are_equal(self, share, speaks):
        fault = {"fraction_of_groups_with_zero_std": share}
        assert steps_of("zero_reward_std", [fault] * 3) == ([3] if speaks else [])

    @pytest.mark.parametrize(
        ("first", "now", "speaks"),
        [
            (1.0, 0.76, False),
            (1.0, 0.74, True),
            (0.7, 0.51, False),
            (0.7, 0.49, True),
            (0.95, 0.69, True),
        ],
    )
    def test_responses_that_are_truncated(self, first, now, speaks):
        """More than half of them, or a quarter more than at first."""
        ended = "fraction_of_samples_properly_ended"
        lines = [{ended: first}] * 5 + [{ended: now}] * 5
        assert bool(steps_of("truncated", lines)) is speaks

    @pytest.mark.parametrize(
        ("first", "now", "speaks"),
        [(2.0, 1.04, True), (2.0, 1.06, False), (1.1, 1.0, False), (1.3, 1.0, True)],
    )
    def test_episodes_of_one_answer(self, first, now, speaks):
        lines = [{"turns": first}] * 3 + [{"turns": now}] * 5
        assert bool(steps_of("turns", lines)) is speaks

    @pytest.mark.parametrize(("spikes", "speaks"), [(3, False), (4, True)])
    def test_gradients_that_spike_in_four_of_ten_steps(self, spikes, speaks):
        """Three spikes with two usual steps between them."""
        usual = [{"grad_norm": 1.0 + 0.01 * (step % 3)} for step in range(12)]
        last = [{"grad_norm": 30.0}, {"grad_norm": 1.0}] * spikes
        assert bool(steps_of("gradient_spikes", [*usual, *last])) is speaks

    @pytest.mark.parametrize(
        ("before", "now", "speaks"),
        [
            (1.0, 10.9, False),
            (1.0, 11.1, True),
            (10.0, 49.0, False),
            (10.0, 51.0, True),
            (0.01, 5.0, False),
        ],
    )
    def test_a_kl_that_leaps_by_5_times_and_by_10_nats(self, before, now, speaks):
        lines = [{"init_policy_kl": before}] * 13 + [{"init_policy_kl": now}] * 3
        assert bool(steps_of("kl", lines)) is speaks

    @pytest.mark.parametrize(
        ("now", "speaks"), [(0.21, False), (0.19, True), (1.99, False), (2.01, True)]
    )
    def test_an_entropy_of_a_fifth_or_twice_the_first(self, now, speaks):
        lines = [{"entropy": 1.0}] * 3 + [{"entropy": now}] * 3
        assert bool(steps_of("entropy", lines)) is speaks

    @pytest.mark.parametrize(("now", "speaks"), [(0.29, False), (0.31, True)])
    def test_a_fifth_more_repetition_than_at_first(self, now, speaks):
        lines = [{"repetition": 0.1}] * 3 + [{"repetition": now}] * 3
        assert bool(steps_of("repetition", lines)) is speaks

    @pytest.mark.parametrize(("norm", "speaks"), [(0.0, True), (1e-12, True), (2e-12, False)])
    def test_a_gradient_of_zero_but_for_rounding(self, norm, speaks):
        assert bool(steps_of("zero_gradient", [{"grad_norm": norm}] * 2)) is speaks

    @pytest.mark.parametrize("name", list(GAP_LIMITS))
    @pytest.mark.parametrize(("factor", "speaks"), [(0.99, False), (1.01, True)])
    def test_a_logprob_diff_between_trainer_and_generator(self, name, factor, speaks):
        usual = {metric: 0.5 * limit for metric, limit in GAP_LIMITS.items()}
        lines = [{**usual, name: factor * GAP_LIMITS[name]}] * 3
        assert bool(steps_of("generator_logprob_diff", lines)) is speaks

    @pytest.mark.parametrize(("earlier", "speaks"), [(7, False), (8, True)])
    def test_a_comparison_with_the_past_needs_eight_steps_before(self, earlier, speaks):
        lines = [{"rewards": 1.0 + 0.01 * (step % 2)} for step in range(earlier)]
        assert bool(steps_of("reward_jump", [*lines, {"rewards": 9.0}])) is speaks

    @pytest.mark.parametrize(
        ("first", "now", "speaks"),
        [
            (0.001, 0.0099, False),
            (0.001, 0.0101, True),
            (0.004, 0.019, False),
            (0.004, 0.021, True),
        ],
    )
    def test_a_logprob_diff_that_grows(self, first, now, speaks):
        """By a factor of 5, and to more than 0.01 nats."""
        lines = [{"generator_logprob_diff": first}] * 3 + [{"generator_logprob_diff": now}] * 3
        assert bool(steps_of("generator_logprob_diff", lines)) is speaks

    def test_a_logprob_diff_of_the_first_steps_has_not_grown(self):
        """Before the third step there is no start to compare with."""
        assert steps_of("generator_logprob_diff", [{"generator_logprob_diff": 0.02}] * 9) == []
