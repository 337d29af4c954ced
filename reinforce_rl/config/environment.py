"""Schema of an episode's environment."""

from __future__ import annotations

from typing import Literal

from reinforce_rl.config.base import Count, Fields, Positive, Section, Text, key


class EnvironmentConfig(Section):
    """An environment that answers the policy, and its processes."""

    name: Text | None = key(
        None,
        "dotted name of a function or class that answers the policy; null: episodes of one answer",
    )
    kwargs: Fields = key({}, "its keyword arguments, as +environment.kwargs.NAME=VALUE")
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "harmony"] = key(
        "auto",
        "form of the policy's tool calls, which a class with tools runs; auto: as the model's "
        "chat template writes them",
    )
    max_turns: Count = key(
        4, "answers of an episode; after the last one its messages are not read", "answers"
    )
    max_episode_tokens: Count = key(
        1024,
        "an episode's tokens after the prompt, the environment's included; a longer one is cut, "
        "see truncated_samples",
        "tokens",
    )
    continuous: bool | None = key(
        None,
        "continue an episode as soon as its reply arrives; false: all wait for the slowest; null: "
        "true unless generation is native",
        details=". With true, the native engine's log-probs depend on the times of the replies by "
        "rounding, so two equal runs may differ",
    )
    num_workers: Count = key(
        2,
        "replies that are computed at a time",
        "processes",
        details=", on each rank that generates. Every episode has its own process",
    )
    turn_timeout_seconds: Positive = key(
        5.0, "a reply that takes longer fails, and the episode's process is killed", "s"
    )
    episode_memory_mb: Count = key(
        2048, "address space of an episode's process beyond what its module takes", "MiB"
    )
    variables: list[Text] = key(
        [], "environment variables that it may read besides PATH, HOME, LANG and the like"
    )
    sandbox: bool = key(
        False,
        "run it in bubblewrap: no network, no other processes, no files but Python's",
        details=" ([details](rewards.md#a-sandbox))",
    )
