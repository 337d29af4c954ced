"""Describe the configuration keys for `--help`, docs/configuration.md and error messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET, Section
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.config.rewards import ServeRewardModelConfig

PROGRAMS: dict[str, type[Section]] = {  # by the name of their YAML
    "train_reinforce_actor": TrainConfig,
    "train_reward_model": TrainRewardModelConfig,
    "serve_reward_model": ServeRewardModelConfig,
}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
    "object": "groups of keys, each under a name of your choice",
}
_SHORT = {
    "integer": "int",
    "number": "float",
    "string": "string",
    "boolean": "bool",
    "object": "fields",
}


@dataclass(frozen=True)
class Key:
    path: str  # dotted
    kind: str  # Markdown
    unit: str
    default: str  # Markdown
    bound: str  # what values it takes; empty where the type says it
    meaning: str  # a sentence, in Markdown
    details: str  # after it, in the documentation only


def keys_of(
    section: Section, path: str = "", follows: dict[str, str] | None = None
) -> Iterator[Key]:
    """Every key below a section, in order; entries under names of the user's choice are one key."""
    properties = _properties(type(section))
    for name, value in section:
        extra = properties[name]
        source = (follows or {}).get(name) or extra.get("follows")
        if isinstance(value, Section):
            yield from keys_of(
                value, f"{path}{name}.", source if isinstance(source, dict) else None
            )
            continue
        default = "required" if value == NOT_SET else f"as `{source}`" if source else scalar(value)
        bound = "" if "kind" in extra else expected_of(type(section), name)
        yield Key(
            path + name,
            extra.get("kind") or _type_of(extra),
            extra.get("unit", ""),
            default,
            "" if bound == _described(extra) else bound,
            extra.get("description", ""),
            extra.get("details", ""),
        )


@functools.cache
def _properties(schema: type[Section]) -> dict[str, Any]:
    return schema.model_json_schema()["properties"]


def scalar(value: Any) -> str:
    """A value in YAML."""
    if value == NOT_SET:
        return "???"
    if isinstance(value, float):
        mantissa, has_exponent, exponent = repr(value).partition("e")
        return f"{float(mantissa)}e{int(exponent)}" if has_exponent else mantissa
    if isinstance(value, list):
        return f"[{', '.join(map(scalar, value))}]"
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()


def _type_of(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(
            dict.fromkeys(
                _type_of(option) for option in schema["anyOf"] if option.get("type") != "null"
            )
        )
    if schema.get("type") == "array":
        return f"list of {_type_of(schema['items'])}s"
    return f"`{schema['const']}`" if schema.get("const") == "deep" else _SHORT[schema["type"]]


def expected_of(schema: type[Section], name: str, *, is_of_value: bool = True) -> str:
    """Say what a key takes: for a value of the right type its bounds and choices, else the type."""
    properties = _properties(schema)[name]
    if is_of_value and "expected" in properties:
        return properties["expected"]
    options = properties.get("anyOf", [properties])
    choices = [
        choice
        for option in options
        for choice in option.get("enum", [option["const"]] if "const" in option else [])
    ]
    if choices:
        return (
            " or ".join(["null", *choices]) if len(options) > 1 else f"one of {', '.join(choices)}"
        )
    bounds = _bounds(options[0]) if is_of_value else ""
    return (
        f"{bounds}{', or null' if len(options) > 1 else ''}" if bounds else _described(properties)
    )


def _bounds(option: dict[str, Any]) -> str:
    least = option.get("minimum")
    most = option.get("maximum")
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    ends = {
        "at least": "minimum",
        "above": "exclusiveMinimum",
        "at most": "maximum",
        "below": "exclusiveMaximum",
    }
    text = " and ".join(f"{word} {option[end]:g}" for word, end in ends.items() if end in option)
    return f"{text} and finite" if text == "above 0" else text


def _described(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_described, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"a list, each {_described(schema['items'])}"
    return _TYPES[schema["type"]]
