"""What `speed` measures: the options of the command line, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gpu_checks.base import CPU
from gpu_checks.shapes import SHAPES

CHECK = "speed"  # the check that they are of


@dataclass(frozen=True)
class SpeedOptions:
    """Models and their work.

    Attributes:
        shapes: of `SHAPES`, in this order.
        prompts: a step.
        group: samples a prompt.
        prompt_tokens, response_tokens: of each.
        micro_batch: sequences in one training pass.
        repeats: rounds, in which the sides alternate.
    """

    shapes: tuple[str, ...] = ("135m", "1b", "8b")
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 256
    response_tokens: int = 128
    micro_batch: int = 8
    repeats: int = 1


# Where only the code is tried.
ON_CPU = SpeedOptions(
    shapes=("tiny",),
    prompts=2,
    group=2,
    prompt_tokens=16,
    response_tokens=8,
    micro_batch=4,
)


def options_of(mode: str, given: Mapping[str, Any]) -> SpeedOptions:
    """Return the mode's options, replaced by the given ones."""
    defaults = ON_CPU if mode == CPU else SpeedOptions()
    values = {**asdict(defaults), **given}
    return SpeedOptions(**{**values, "shapes": tuple(values["shapes"])})


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        f"options of {CHECK}",
        "which takes all of the time if one of them is given",
    )
    group.add_argument("--shapes", nargs="+", choices=SHAPES, help="models, with random weights")
    group.add_argument("--prompts", type=int, help="prompts a step")
    group.add_argument("--group", type=int, help="samples a prompt")
    group.add_argument("--prompt-tokens", type=int, help="of each prompt")
    group.add_argument("--response-tokens", type=int, help="of each response")
    group.add_argument("--micro-batch", type=int, help="sequences in one training pass")
    group.add_argument("--repeats", type=int, help="rounds, in which the sides alternate")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options by their names in `SpeedOptions`."""
    values = {field.name: getattr(args, field.name) for field in fields(SpeedOptions)}
    return {name: value for name, value in values.items() if value is not None}


def fault_of(options: SpeedOptions) -> str | None:
    """Return why the options cannot be measured."""
    for name, value in asdict(options).items():
        if name != "shapes" and value < 1:
            return f"--{name.replace('_', '-')} is {value}, expected at least 1"
    if options.group < 2:
        return "--group is 1; RLOO compares the samples of a prompt, expected at least 2"
    length = options.prompt_tokens + options.response_tokens
    for shape in options.shapes:
        positions = SHAPES[shape]["max_position_embeddings"]
        if length > positions:
            return f"{length} tokens exceed the {positions} positions of {shape}"
    return None
