"""Alerts: rules on the metrics of a run's steps; docs/monitoring.md has the thresholds.

Every rule compares with the run's own past, so that it needs neither the scale of a reward nor the
length of a task.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.monitoring.stragglers import Slowest

STRAGGLER_FACTOR: float = TrainConfig().trainer.straggler_factor  # the default
# nats a token
GAP_LIMITS = {
    "generator_logprob_diff": 0.05,
    "generator_logprob_diff_p99": 0.5,
    "generator_logprob_diff_max": 5.0,
}
WINDOW = 50  # steps of history
FEWEST = 8  # minimum of earlier steps for a comparison with the past
QUIET = 5  # steps without a fault after which its rule may fire again
_PAGE = "docs/monitoring.md"


@dataclass(frozen=True)
class Alert:
    """A fault that a person should look at; `count` steps of `first` .. `last` have it."""

    kind: str  # name of the rule, or a run's state
    first: int
    last: int
    count: int
    text: str  # of the last step


class History:
    """The last `WINDOW` training steps, first values of each metric, and last validations."""

    def __init__(self, straggler_factor: float):
        self.straggler_factor = straggler_factor
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        # (validation reward, training reward)
        self.validations: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._first: dict[str, list[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        if is_training(line):
            self.lines.append(line)
            for key in line:
                if key.startswith("train/") and math.isfinite(value := number(line[key])):
                    self._first.setdefault(key, []).append(value)
                    del self._first[key][3:]
        if math.isfinite(value := number(line.get("val/rewards"))):
            self.validations.append((value, self.middle("train/rewards", 5)))

    def now(self, key: str) -> float:
        return number(self.lines[-1].get(key))

    def last(self, key: str, count: int = WINDOW) -> list[float]:
        """Return the finite values of the last `count` steps, this one included."""
        values = (number(line.get(key)) for line in list(self.lines)[-count:])
        return [value for value in values if math.isfinite(value)]

    def past(self, key: str, count: int = WINDOW) -> list[float]:
        """Return the finite values of the `count` steps before this one.

        Empty if there are fewer than `FEWEST`.
        """
        values = (number(line.get(key)) for line in list(self.lines)[-count - 1 : -1])
        finite = [value for value in values if math.isfinite(value)]
        return finite if len(finite) >= FEWEST else []

    def middle(self, key: str, count: int = 3) -> float:
        return statistics.median(self.last(key, count) or [math.nan])

    def first(self, key: str) -> float:
        """Return the median of the run's first three values; NaN with fewer."""
        values = self._first.get(key, [])
        return statistics.median(values) if len(values) == 3 else math.nan

    def initial(self, key: str) -> float:
        return next(iter(self._first.get(key, ())), math.nan)


See = Callable[[History], str | None]  # returns the fault of the last step; None without one


@dataclass(frozen=True)
class Rule:
    name: str  # key of `alerts.rules`
    see: See
    why: str
    advice: str
    steps: int  # consecutive steps with the fault before the rule fires


RULES: list[Rule] = []


def rule(why: str, advice: str, *, steps: int = 1) -> Callable[[See], See]:
    """Register a function of the history as a rule with its name."""

    def register(see: See) -> See:
        RULES.append(Rule(see.__name__, see, why, advice, steps))
        return see

    return register


class AlertRules:
    """The rules, and their state. `look` takes the lines of metrics.jsonl in order.

    A rule fires once for a fault, and again only after `QUIET` steps without it.

    Args:
        rules: actions of `alerts.rules` by name; a missing rule warns.
    """

    def __init__(
        self,
        rules: Mapping[str, str] = MappingProxyType({}),
        straggler_factor: float = STRAGGLER_FACTOR,
    ):
        self._rules = [rule for rule in RULES if rules.get(rule.name) != "off"]
        self._stopping = {name for name, action in rules.items() if action == "stop"}
        self._history = History(straggler_factor)
        self._held = Counter[str]()  # steps in a row
        self._firing: dict[str, Alert] = {}
        self._ended: deque[Alert] = deque(maxlen=1000)

    def look(self, line: Mapping[str, Any]) -> list[Alert]:
        """Return the alerts that start at this line."""
        self._history.add(line)
        if not is_training(line):
            return []
        step = line["step"]
        new = []
        for rule in self._rules:
            seen = rule.see(self._history)
            self._held[rule.name] = self._held[rule.name] + 1 if seen else 0
            past = self._firing.get(rule.name)
            if seen and (past or self._held[rule.name] >= rule.steps):
                text = f"{seen}: {rule.why}; {rule.advice}; {_PAGE}#{rule.name}"
                past = past or Alert(rule.name, step, step, 0, "")
                self._firing[rule.name] = replace(past, last=step, count=past.count + 1, text=text)
                new += [self._firing[rule.name]] if past.count == 0 else []
            elif past and step - past.last >= QUIET:
                self._ended.append(self._firing.pop(rule.name))
        return new

    def stops(self, alert: Alert) -> bool:
        return alert.kind in self._stopping

    @property
    def now(self) -> list[Alert]:
        """The alerts of the last step."""
        lines = self._history.lines
        return [
            alert for alert in self._firing.values() if lines and alert.last == lines[-1]["step"]
        ]

    @property
    def alerts(self) -> list[Alert]:
        return [*self._ended, *self._firing.values()]


def is_training(line: Mapping[str, Any]) -> bool:
    return any(key.startswith("train/") for key in line)


def number(value: float | None) -> float:
    """Return a metric's value; NaN for null or a missing value."""
    return math.nan if value is None else float(value)


def spread(values: Sequence[float]) -> float:
    """Return the deviation of a normal distribution with the values' median absolute deviation."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


@rule(
    "one such step ruins the weights",
    "look for the first such number in metrics.jsonl; lower model.optim.lr",
)
def not_finite(run: History) -> str | None:
    keys = ("train/actor_loss", "train/loss", "train/rewards")
    wrong = [key for key in keys if key in run.lines[-1] and not math.isfinite(run.now(key))]
    return f"{' and '.join(wrong)} {'are' if wrong[1:] else 'is'} not finite" if wrong else None


@rule("the optimizer step was skipped", "harmless now and then in bf16; else lower model.optim.lr")
def skipped(run: History) -> str | None:
    return "the gradient was not finite" if run.now("train/skipped_step") > 0 else None


@rule(
    "they are left out of the loss",
    "score_fault in the records, and the reward source's log, say why",
)
def unscored(run: History) -> str | None:
    scored = run.now("train/fraction_of_samples_scored")
    return f"{1 - scored:.1%} of the samples have no score" if scored < 1 else None


@rule(
    "long responses that fail are not penalised",
    "raise the reward source's limits, or lower max_length",
)
def unscored_length(run: History) -> str | None:
    shares = run.last("train/unscored_length_auc", 10)
    if len(shares) < 3 or math.isnan(run.now("train/unscored_length_auc")):
        return None
    share = statistics.median(shares)
    if share < 0.8:
        return None
    return f"a sample without a score is longer than one with it in {share:.0%} of the pairs"


@rule(
    "there is no signal to learn from",
    "check that the reward source is the right one and runs; read samples",
    steps=3,
)
def constant_reward(run: History) -> str | None:
    reward = run.now("train/rewards")
    std = run.now("train/reward_std")
    limit = max(1e-4 * abs(reward), 0.02 * run.first("train/reward_std"), 1e-12)
    if not std <= limit or solved(run):
        return None
    return f"the rewards of all samples are {reward:.4g} ± {std:.1g}"


def equal_groups(run: History) -> str | None:
    equal = run.now("train/fraction_of_groups_with_zero_std")
    reward = run.now("train/rewards")
    text = f"in {equal:.0%} of the groups all rewards are equal, {reward:.3f} on average"
    return text if equal >= 0.9 else None


@rule(
    "there is little to learn from",
    "use other prompts, more samples a prompt, or dynamic_filtering=true",
    steps=3,
)
def zero_reward_std(run: History) -> str | None:
    return None if solved(run) else equal_groups(run)


@rule(
    "little is left to learn",
    "use harder prompts or stop, unless the policy has collapsed: read samples",
    steps=3,
)
def solved(run: History) -> str | None:
    reward = run.now("train/rewards")
    std = run.now("train/reward_std")
    rise = reward - run.initial("train/rewards")
    has_risen = rise > max(3 * std, 0.5 * run.initial("train/reward_std"))
    return equal_groups(run) if has_risen and reward >= run.middle("train/rewards", 20) else None


@rule(
    "the weights do not change",
    "see train/fraction_of_samples_trained and train/reward_group_std",
    steps=2,
)
def zero_gradient(run: History) -> str | None:
    return "the norm of the gradient is zero" if run.now("train/grad_norm") <= 1e-12 else None


@rule(
    "no policy changes that much in a step",
    "check whether the reward server restarted with another model, or failed",
)
def reward_jump(run: History) -> str | None:
    rewards = run.past("train/rewards", 20)
    stds = run.past("train/reward_std", 20)
    distance = run.now("train/init_policy_kl")
    before = max(run.past("train/init_policy_kl", 10), default=math.nan)
    # A jump of the KL means that the policy changed, not the reward source.
    if not rewards or not any(stds) or distance > 1.5 * before + 1:
        return None
    now = run.now("train/reward_std")
    moves = [new - old for old, new in itertools.pairwise(rewards)]
    jumps = abs(run.now("train/rewards") - rewards[-1]) > max(*stds, 6 * spread(moves))
    if not jumps and 0.2 * min(stds) <= now <= 5 * max(*stds, run.first("train/reward_std")):
        return None
    was = f"{rewards[-1]:.3f} ± {stds[-1]:.3f}"
    return f"the rewards went from {was} to {run.now('train/rewards'):.3f} ± {now:.3f}"


@rule(
    "the policy moves away from the initial one faster and faster",
    "lower model.optim.lr or raise initial_policy_kl_penalty",
)
def kl(run: History) -> str | None:
    past = run.last("train/init_policy_kl", 13)[:-3]
    now = run.middle("train/init_policy_kl")
    usual = statistics.median(past) if len(past) >= 3 else math.nan
    # Early in a run the KL grows with the square of the steps, by less than 5 times.
    return (
        f"the KL is {now:.3g} nats, {usual:.3g} in the steps before"
        if now > max(5 * usual, usual + 10)
        else None
    )


@rule(
    "it always writes the same, or noise",
    "read samples; resume from an older checkpoint with a lower learning rate",
)
def entropy(run: History) -> str | None:
    key = "train/entropy" if math.isfinite(run.now("train/entropy")) else "train/entropy_sampled"
    now = run.middle(key)
    first = run.initial(key)
    is_usual = not (now < 0.2 * first or now > 2 * first)
    return None if is_usual else f"the entropy is {now:.3f} nats a token, {first:.3f} at first"


@rule(
    "their missing ends are not scored",
    "raise max_length, or see truncated_samples and reward_shaping.length_penalty",
)
def truncated(run: History) -> str | None:
    key = "train/fraction_of_samples_properly_ended"
    now = 1 - run.middle(key, 5)
    first = 1 - run.first(key)
    if now > 0.5 or now > first + 0.25:
        return f"{now:.0%} of the responses are cut at max_length" + (
            f", {first:.0%} at first" if first < now else ""
        )
    return None


@rule(
    "the policy does not use the environment any more",
    "read samples; does a first answer earn what a later one would?",
    steps=3,
)
def turns(run: History) -> str | None:
    now = run.middle("train/turns")
    first = run.first("train/turns")
    if now < 1.05 and first > 1.2:
        return f"episodes have {now:.2f} answers, {first:.2f} at first"
    return None


@rule("the reward may pay for length alone", "read samples; see reward_shaping.length_penalty")
def length(run: History) -> str | None:
    now = run.middle("train/response_lengths", 5)
    first = run.first("train/response_lengths")
    pays = run.middle("train/length_reward_correlation", 5)
    rise = run.middle("train/rewards", 5) - run.first("train/rewards")
    if len(run.lines) < FEWEST or not rise > 0.5 * run.first("train/reward_std"):
        return None
    if now > 1.5 * first or (now > 1.2 * first and pays > 0.5):
        pair = (
            f"; within a group the correlation with the reward is {pays:.2f}"
            if math.isfinite(pays)
            else ""
        )
        return f"responses have {now:.1f} tokens, {first:.1f} at first{pair}"
    return None


@rule(
    "the reward may pay for it",
    "read samples; change the reward, or raise initial_policy_kl_penalty",
)
def repetition(run: History) -> str | None:
    now = run.middle("train/repetition")
    first = run.first("train/repetition")
    size = run.middle("train/compression")
    at_first = run.first("train/compression")
    if now > first + 0.2:
        return (
            f"{now:.0%} of the trigrams of words repeat earlier ones of the response, {first:.0%} "
            "at first"
        )
    text = f"responses compress to {size:.0%} of their size, to {at_first:.0%} at first"
    return text if size < 0.6 * at_first else None


@rule("the gradient is biased", "see reinforce-rl check engine MODEL, or set generator_correction")
def generator_logprob_diff(run: History) -> str | None:
    # Stale rollouts have a gap because of the other weights.
    if run.now("train/staleness") > 0:
        return None
    gaps = {name: run.now(f"train/{name}") for name in GAP_LIMITS}
    over = [
        f"{name} is {gaps[name]:.3g}" for name, limit in GAP_LIMITS.items() if gaps[name] > limit
    ]
    now = run.middle("train/generator_logprob_diff")
    first = run.first("train/generator_logprob_diff")
    # Growth is relative to the first three steps.
    if not over and math.isfinite(first) and now > max(0.01, 5 * first):
        over = [f"generator_logprob_diff is {now:.3g}, {first:.3g} at first, and grows"]
    return (
        f"trainer and generator differ on the same tokens: {', '.join(over)} nats" if over else None
    )


@rule(
    "single batches change the policy a lot",
    "lower model.optim.lr or gradient_clip_val; read their samples",
)
def gradient_spikes(run: History) -> str | None:
    past = run.past("train/grad_norm", 20)
    last = run.last("train/grad_norm", 10)
    usual = statistics.median(past) if past else 0.0
    limit = max(5 * usual, usual + 6 * spread(past)) if usual else math.inf
    spikes = [value for value in last if value > limit]
    if len(spikes) < 4:
        return None
    return (
        f"the gradient's norm was {max(spikes):.3g}, {usual:.3g} as a rule, in {len(spikes)} of "
        "the last 10 steps"
    )


@rule(
    "the policy learns only these prompts",
    "resume from the best checkpoint with more prompts or a higher KL penalty",
)
def overfitting(run: History) -> str | None:
    if len(run.validations) < 3:
        return None
    best, then = max(run.validations)
    (before, _), (last, now) = list(run.validations)[-2:]
    margin = 0.25 * run.middle("train/reward_std", WINDOW)
    if max(before, last) < best - margin and now > then + margin:
        return (
            f"validation fell from {best:.3f} to {last:.3f}, while training rose from {then:.3f} "
            f"to {now:.3f}"
        )
    return None


@rule(
    "a prompt that is trained on cannot validate, and a repeated one counts twice",
    "drop them from the data",
)
def prompts_repeated(run: History) -> str | None:
    share = run.now("train/prompts_repeated")
    return (
        f"{share:.0%} of the prompts are on another line of the data, too, or in validation"
        if share > 0
        else None
    )


@rule("all ranks wait for it", "look at that machine (docs/operations.md#stragglers)")
def straggler(run: History) -> str | None:
    line = run.lines[-1]
    slow_phases = []
    for phase in [
        key.split("/")[1] for key in line if key.startswith("timing/") and key.endswith("/rank")
    ]:
        rank, most, median = (
            number(line.get(f"timing/{phase}/{name}")) for name in ("rank", "max", "median")
        )
        if Slowest(phase, 0, "", most, median).stands_out(
            run.straggler_factor, run.now("timers/step_time")
        ):
            slow_phases.append(
                f"{phase} took {most:.1f} s on rank {rank:.0f}, {median:.1f} s on the median rank"
            )
    return "; ".join(slow_phases) or None
