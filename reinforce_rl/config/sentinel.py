"""Schema of the sentinel: what a rule that speaks does. docs/sentinel.md has the rules and their thresholds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from reinforce_rl.config.base import Section, key


def _off(value: Any) -> Any:
    return "off" if value is False else value  # YAML's reading of off


Action = Annotated[Literal["warn", "stop", "off"], BeforeValidator(_off)]


class RulesConfig(Section):
    not_finite: Action = key("warn", "the loss or the mean reward is not finite")
    skipped: Action = key("warn", "an optimizer step was skipped, as its gradient was not finite")
    unscored: Action = key("warn", "samples have no score")
    unscored_length: Action = key("warn", "long samples fail to be scored more often than short ones")
    constant_reward: Action = key("warn", "all samples earn the same, or nearly")
    no_spread: Action = key("warn", "in nearly all groups all rewards are equal")
    solved: Action = key("warn", "the same, at a reward that is far above the first one")
    zero_gradient: Action = key("warn", "the gradient is zero")
    changed_scorer: Action = key("warn", "level or spread of the rewards jumps from one step to the next")
    kl: Action = key("warn", "the KL runs away from its own past")
    entropy: Action = key("warn", "the entropy has collapsed, or doubled")
    cut: Action = key("warn", "most responses are cut at max_length, or ever more are")
    length: Action = key("warn", "responses grow along with the reward")
    repetition: Action = key("warn", "responses repeat themselves more and more")
    generator_gap: Action = key("warn", "trainer and generator differ, or part from each other")
    gradient_spikes: Action = key("warn", "the gradient's norm jumps again and again")
    overfitting: Action = key("warn", "the validation's reward falls while training's rises")
    prompts_seen: Action = key("warn", "a training prompt occurs twice in the data, or in validation")
    straggler: Action = key("warn", "a rank is slow, by trainer.straggler_factor")


class SentinelConfig(Section):
    rules: RulesConfig = key(
        RulesConfig(),
        "warn: say it once; stop: save, too, and end with exit code 78; off. See docs/sentinel.md",
    )
