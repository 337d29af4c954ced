"""Encodes messages as JSON and tensors, and checks every field of what it decodes.

Nothing is unpickled, so a program that joins a run can send data and nothing else. A message has
two parts, `[JSON, tensors]`: `{"kind": NAME, ...fields}` of a dataclass in `messages`, and its
tensors in the safetensors format (https://github.com/huggingface/safetensors), or nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from reinforce_rl import errors
from reinforce_rl.data.batches import Completions
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_OUTSIDE, FINISH_STOP
from reinforce_rl.errors import ReinforceError, key_of
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rollout.messages import (
    Abandoned,
    Dismissed,
    EndReceived,
    GenerationRequests,
    GenerationResult,
    GeneratorFailed,
    Message,
    NewWeights,
    Received,
    Register,
    RequestCredit,
    RunEnded,
)

_MAX_QUOTED = 300  # characters of a fault that a message has
_MAX_FAULT = 10_000  # characters of an error's text, or of why a sample has no score
_MAX_SOURCES = 1000
_MAX_SOURCE_NAME = 200  # characters
_KEY = re.compile(r"[a-z0-9_.]{0,200}")  # of an error
# Of safetensors, and of torch for shapes that it cannot have.
_TENSOR_ERRORS = (
    SafetensorError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class BadMessageError(ValueError):
    """What was received is no message. The text names the kind and the field."""


@dataclass(frozen=True)
class _Failure:
    """An error by the name of its class."""

    name: str
    text: str
    key: str = ""


@dataclass(frozen=True)
class _ResultFields:
    """A `GenerationResult` without its tensors."""

    number: int
    prompt_ids: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    environment_faults: tuple[str | None, ...]
    sources: tuple[str, ...]  # of `Rewards.by_source`, in order, which safetensors does not keep
    faults: dict[int, str]
    failure: _Failure | None


@dataclass(frozen=True)
class _FailedFields:
    failure: _Failure


_PLAIN = (
    Register,
    RequestCredit,
    Received,
    EndReceived,
    GenerationRequests,
    RunEnded,
    NewWeights,
    Abandoned,
    Dismissed,
)
_FIELDS: dict[str, type] = {kind.__name__: kind for kind in _PLAIN}
_FIELDS |= {GenerationResult.__name__: _ResultFields, GeneratorFailed.__name__: _FailedFields}

# Errors that can be made from their text; any other arrives as a `ReinforceError` with the same
# text.
_ERRORS: dict[str, type[ReinforceError]] = {
    kind.__name__: kind
    for kind in (
        errors.CheckpointError,
        errors.DataError,
        errors.EngineLostError,
        errors.GenerationError,
        errors.LostRankError,
        errors.ModelStuckError,
        errors.RankLostError,
        errors.RewardServerError,
        errors.TooManyFailedRewardsError,
    )
}

# Tensors of a result: name, type, number of dimensions.
_COMPLETIONS = {
    "tokens": (torch.int64, 2),
    "lengths": (torch.int64, 1),
    "log_probs": (torch.float32, 2),
    "weight_versions": (torch.int64, 2),
    "policy_mask": (torch.bool, 2),
    "history_mask": (torch.bool, 2),
    "turn_rewards": (torch.float32, 2),
    "environment_rewards": (torch.float32, 1),
}
_NEEDED = ("tokens", "lengths")
_REWARDS = {"values": (torch.float32, 1), "status": (torch.int32, 1)}
_BY_SOURCE = "rewards.by_source."


def encode(message: Message) -> list[bytes]:
    """Return the parts of a message."""
    tensors: dict[str, Tensor] = {}
    if isinstance(message, GenerationResult):
        fields = asdict(_fields_of(message))
        tensors = _tensors_of(message)
    elif isinstance(message, GeneratorFailed):
        fields = asdict(_FailedFields(_failure_of(message.failure)))
    else:
        fields = asdict(message)
    text = json.dumps({"kind": type(message).__name__, **fields})
    return [text.encode(), safetensors.save(tensors) if tensors else b""]


def decode(parts: Sequence[bytes | memoryview]) -> Message:
    """Return the message of these parts; raise BadMessageError if they are none."""
    if len(parts) != 2:
        raise BadMessageError(f"{len(parts)} parts, expected 2")
    text, tensors = parts
    try:
        values = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"no JSON: {str(error)[:_MAX_QUOTED]}") from error
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        given = repr(kind[:_MAX_QUOTED]) if isinstance(kind, str) else type(kind).__name__
        raise BadMessageError(f"kind is {given}, expected one of {', '.join(_FIELDS)}")
    if unknown := sorted(values.keys() - set(_FIELDS[kind].__dataclass_fields__)):
        raise BadMessageError(f"{kind} has no field {unknown[0][:_MAX_QUOTED]!r}")
    try:
        fields = _adapter(kind).validate_python(values)
    except (ValidationError, RecursionError) as error:
        raise BadMessageError(f"{kind}: {str(error)[:_MAX_QUOTED]}") from error
    if isinstance(fields, _ResultFields):
        return _result_of(fields, _read_tensors(bytes(tensors)))
    if len(tensors):
        raise BadMessageError(f"{kind} has no tensors, but {len(tensors)} bytes of them came")
    if isinstance(fields, _FailedFields):
        return GeneratorFailed(_error_of(fields.failure))
    return fields


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_FIELDS[kind])


def _fields_of(result: GenerationResult) -> _ResultFields:
    rewards = result.rewards
    return _ResultFields(
        number=result.number,
        prompt_ids=result.prompt_ids,
        finish_reasons=result.completions.finish_reasons,
        environment_faults=result.completions.environment_faults,
        sources=() if rewards is None else tuple(rewards.by_source),
        faults={} if rewards is None else dict(rewards.faults),
        failure=None if result.failure is None else _failure_of(result.failure),
    )


def _tensors_of(result: GenerationResult) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        f"completions.{name}": getattr(result.completions, name) for name in _COMPLETIONS
    }
    if result.rewards is not None:
        tensors |= {f"rewards.{name}": getattr(result.rewards, name) for name in _REWARDS}
        tensors |= {
            f"{_BY_SOURCE}{name}": values for name, values in result.rewards.by_source.items()
        }
    # Copies, as safetensors refuses tensors that share memory.
    return {
        name: tensor.cpu().contiguous().clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _read_tensors(data: bytes) -> dict[str, Tensor]:
    if not data:
        return {}
    try:
        return safetensors.load(data)
    except _TENSOR_ERRORS as error:
        raise BadMessageError(f"tensors: {str(error)[:_MAX_QUOTED]}") from error


def _result_of(fields: _ResultFields, tensors: dict[str, Tensor]) -> GenerationResult:
    _check_texts(fields)
    completions = _completions_of(fields, tensors)
    rewards = None
    if "rewards.values" in tensors:
        rewards = _rewards_of(fields, tensors)
        _check_shape("rewards.values", rewards.values, completions.lengths.shape)
    if tensors:
        raise BadMessageError(f"GenerationResult has no tensor {min(tensors)[:_MAX_QUOTED]!r}")
    failure = None if fields.failure is None else _error_of(fields.failure)
    return GenerationResult(fields.number, fields.prompt_ids, completions, rewards, failure)


def _check_texts(fields: _ResultFields) -> None:
    """Check what becomes names of metrics and texts of records."""
    if len(fields.sources) > _MAX_SOURCES:
        raise BadMessageError(f"sources are {len(fields.sources)}, expected at most {_MAX_SOURCES}")
    longest_name = max(map(len, fields.sources), default=0)
    if longest_name > _MAX_SOURCE_NAME:
        raise BadMessageError(
            f"sources has a name of {longest_name} characters, expected at most {_MAX_SOURCE_NAME}"
        )
    environment_faults = [fault for fault in fields.environment_faults if fault is not None]
    longest_fault = max(map(len, [*fields.faults.values(), *environment_faults]), default=0)
    if longest_fault > _MAX_FAULT:
        raise BadMessageError(
            f"faults has a text of {longest_fault} characters, expected at most {_MAX_FAULT}"
        )


def _completions_of(fields: _ResultFields, tensors: dict[str, Tensor]) -> Completions:
    taken: dict[str, Any] = {}
    for name, form in _COMPLETIONS.items():
        take = _take_needed if name in _NEEDED else _take
        taken[name] = take(tensors, f"completions.{name}", *form)
    shape = taken["tokens"].shape
    samples, width = shape
    for name, tensor in taken.items():
        if tensor is not None:
            _check_shape(f"completions.{name}", tensor, shape[: tensor.ndim])
    lengths = taken["lengths"]
    finish_reasons = fields.finish_reasons
    faults = fields.environment_faults
    if faults and len(faults) != samples:
        raise BadMessageError(f"environment_faults are {len(faults)}, expected {samples}")
    if len(finish_reasons) != samples:
        raise BadMessageError(f"finish_reasons are {len(finish_reasons)}, expected {samples}")
    if unknown := set(finish_reasons) - {FINISH_STOP, FINISH_LENGTH, FINISH_OUTSIDE}:
        raise BadMessageError(f"finish_reasons has {min(unknown)[:_MAX_QUOTED]!r}")
    if bool(((lengths < 0) | (lengths > width)).any()):
        raise BadMessageError(f"completions.lengths is outside of 0 to {width}")
    return Completions(**taken, finish_reasons=finish_reasons, environment_faults=faults)


def _rewards_of(fields: _ResultFields, tensors: dict[str, Tensor]) -> Rewards:
    values = _take_needed(tensors, "rewards.values", *_REWARDS["values"])
    status = _take_needed(tensors, "rewards.status", *_REWARDS["status"])
    _check_shape("rewards.status", status, values.shape)
    by_source = {}
    for source in fields.sources:
        name = f"{_BY_SOURCE}{source}"
        by_source[source] = _take_needed(tensors, name, torch.float32, 1)
        _check_shape(name, by_source[source], values.shape)
    return Rewards(values, status, by_source, fields.faults)


def _take(
    tensors: dict[str, Tensor], name: str, dtype: torch.dtype, dimensions: int
) -> Tensor | None:
    tensor = tensors.pop(name, None)
    if tensor is not None and (tensor.dtype != dtype or tensor.ndim != dimensions):
        form = f"{tensor.dtype} of {tensor.ndim} dimensions"
        raise BadMessageError(f"{name} is {form}, expected {dtype} of {dimensions}")
    return tensor


def _take_needed(
    tensors: dict[str, Tensor], name: str, dtype: torch.dtype, dimensions: int
) -> Tensor:
    tensor = _take(tensors, name, dtype, dimensions)
    if tensor is None:
        raise BadMessageError(f"GenerationResult has no tensor {name}")
    return tensor


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise BadMessageError(
            f"{name} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}"
        )


def _failure_of(error: BaseException) -> _Failure:
    key = key_of(error)
    if not _KEY.fullmatch(key):  # of an error that is not this package's
        key = ""
    return _Failure(type(error).__name__, str(error), key)


def _error_of(failure: _Failure) -> ReinforceError:
    if not _KEY.fullmatch(failure.key):
        raise BadMessageError(f"an error has the key {failure.key[:_MAX_QUOTED]!r}")
    kind = _ERRORS.get(failure.name, ReinforceError)
    return kind(failure.text[:_MAX_FAULT], key=failure.key)
