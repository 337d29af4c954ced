"""Base of the configuration schemas: pydantic sections whose fields carry their documentation.

`tools/config_docs.py` generates the comments of conf/*.yaml, docs/configuration.md and the JSON
schemas from them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from reinforce_rl.errors import Fault
from reinforce_rl.utils.net import checked_host

DEEP = "deep"  # value of `preflight`
NOT_SET = "(not set)"  # default of a required key
# Types of the errors of our own validators, beside pydantic's.
IS_ZERO = "is_zero"
IS_NOT_REGISTERED = "is_not_registered"
# what `Host` takes
HOST = "a host name or an address, without port and zone, such as node7, 10.0.0.7 or fd00::7"


class Section(BaseModel):
    """A group of keys.

    Types are strict; an int may stand for a float, and every float is finite.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def all_faults(self, faults_of_keys: list[str]) -> Iterable[str]:
        """Return the errors in single keys that matter, and those across keys.

        Of a program's whole schema.
        """
        return faults_of_keys


def key(
    default: Any,
    sentence: str = "",
    unit: str = "",
    *,
    details: str = "",
    kind: str = "",
    expected: str = "",
    follows: str | dict[str, str] = "",
    heading: str = "",
    **bounds: Any,
) -> Any:
    """Declare a configuration key.

    Args:
        default: `NOT_SET` makes the key required.
        sentence: YAML comment and start of the row in the documentation.
        unit: of a number.
        details: Markdown after the sentence, in the documentation only.
        kind: documented type, if the annotation does not say it.
        expected: end of the error message, if bounds and choices do not say it.
        follows: dotted key that the YAML takes the default from; for a section, by name of its key.
        heading: comment line before the key in the YAML.
        bounds: constraints of pydantic's `Field`: ge, gt, le, lt.
    """
    extra: dict[str, Any] = {"unit": unit, "details": details, "kind": kind, "expected": expected}
    extra |= {"follows": follows, "heading": heading}
    return Field(
        default,
        description=sentence,
        json_schema_extra={k: v for k, v in extra.items() if v},
        **bounds,
    )


def settings_fault(cfg: Section, settings: Sequence[str], advice: str, *, key: str) -> Fault:
    """Return the fault "SETTING is VALUE and SETTING is VALUE; advice".

    Args:
        settings: full dotted names. The group of the one before it is not printed again.
        key: of the fault.
    """
    parts: list[str] = []
    group_before = ""
    for setting in settings:
        group, _, name = setting.rpartition(".")
        is_beside = bool(parts) and group == group_before
        printed = name if is_beside else setting
        value = attrgetter(setting)(cfg)
        printed_value = json.dumps(value) if isinstance(value, bool | None) else repr(value)
        parts.append(f"{printed} is {printed_value}")
        group_before = group
    return Fault(f"{' and '.join(parts)}; {advice}", key=key)


def _as_text(value: Any) -> Any:
    """Turn a whole number, or the names of a group, into texts: YAML and Hydra read 32 as a
    number.
    """
    if isinstance(value, dict):
        return {str(name): item for name, item in value.items()}
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_path(value: Any) -> Any:
    """Expand a leading ~, which no shell does within KEY=~/folder, nor a YAML file."""
    value = _as_text(value)
    return os.path.expanduser(value) if isinstance(value, str) else value


def _as_host(value: Any) -> Any:
    """Remove the brackets of `[::1]`, which Hydra reads as a list, and check the host."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    value = _as_text(value)
    return checked_host(value) if isinstance(value, str) else value


def _not_zero(value: Any) -> Any:
    if value == 0:
        raise PydanticCustomError(IS_ZERO, "zero")
    return value


@dataclass(frozen=True)
class NameIn:
    """Annotation of a key whose value is a name in a registry: `Annotated[str, NameIn(REGISTRY)]`.

    Checks, documentation and the JSON schema read the registry, so a new entry is a new choice.
    """

    registry: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.registry), "type": "string"}

    def _checked(self, name: str) -> str:
        if name not in self.registry:
            raise PydanticCustomError(IS_NOT_REGISTERED, "not a name in the registry")
        return name


Text = Annotated[str, BeforeValidator(_as_text)]
PathText = Annotated[str, BeforeValidator(_as_path)]
Host = Annotated[str, BeforeValidator(_as_host)]
Fields = Annotated[dict[str, Any], BeforeValidator(_as_text)]  # names that the user chooses
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Weight = Annotated[float, AfterValidator(_not_zero)]
Precision = Annotated[Literal["auto", "32", "bf16"], BeforeValidator(_as_text)]
Steps = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # -1: no bound
