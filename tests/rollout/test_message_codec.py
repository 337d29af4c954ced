"""Messages between trainers and generators arrive as sent, and hold data only."""

import json
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import (
    ConfigError,
    EngineLostError,
    GenerationError,
    ReinforceError,
    RewardServerError,
)
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rollout.message_codec import BadMessageError, decode, encode
from reinforce_rl.rollout.messages import (
    Abandoned,
    Dismissed,
    EndReceived,
    GenerationRequest,
    GenerationRequests,
    GenerationResult,
    GeneratorFailed,
    NewWeights,
    Received,
    Register,
    RequestCredit,
    RunEnded,
)

# Values that a line of prompts may hold: integers beyond 64 bits, NaN, a lone surrogate, names like
# those on the wire.
METADATA = {
    "answer": 10**30,
    "nan": float("inf"),
    "text": "\ud800",
    "kind": {"kind": "GenerationRequests"},
    "none": [None, 1.5],
}
PROMPTS = (
    Prompt(3, "hi", (5, 6), METADATA, ({"role": "user", "content": "hi"},), "easy"),
    Prompt(9, "", ()),
)
REQUEST = GenerationRequest(7, 4, 3, PROMPTS, 2, 2**63, allow_newer=False)


def completions(**changed: Any) -> Completions:
    values = {
        "tokens": torch.arange(12).reshape(4, 3),
        "lengths": torch.tensor([3, 0, 1, 2]),
        "finish_reasons": ("stop", "length", "outside_vocabulary", "stop"),
        "log_probs": -torch.rand(4, 3),
        "weight_versions": torch.full((4, 3), 3),
    }
    return Completions(**{**values, **changed})


def rewards() -> Rewards:
    values = torch.tensor([1.0, float("nan"), -2.5, 1e30])
    return Rewards(
        values,
        torch.arange(4).int(),
        {"accuracy": values, "a.b": values + 1},
        {1: "no \x00 answer"},
    )


EMPTY = completions(
    tokens=torch.zeros(4, 0).long(),
    lengths=torch.zeros(4).long(),
    log_probs=torch.zeros(4, 0),
    weight_versions=torch.zeros(4, 0).long(),
)
RESULT = GenerationResult(7, (3, 9), completions(), rewards())


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal and of one type; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        values_equal = torch.equal(a.nan_to_num(-9), b.nan_to_num(-9))
        return values_equal and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if hasattr(a, "__dataclass_fields__"):
        return same(vars(a), vars(b))
    return a == b


@pytest.mark.parametrize(
    "message",
    [
        Register(2, "host, process 1", {"seed": 1, "model": {"depth": [1, None]}}),
        RequestCredit(-3),
        RESULT,
        GenerationResult(7, (3, 9), completions(log_probs=None, weight_versions=None)),
        GenerationResult(7, (), EMPTY),
        Received(3, 4, "a fault"),
        GenerationRequests((REQUEST, replace(REQUEST, prompts=(), allow_newer=True))),
        RunEnded(),
        EndReceived(),
        NewWeights(1, 2, 3, 4),
        Abandoned(1, "why"),
        Dismissed("why \u2028"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_arrives_is_what_was_sent(message):
    assert same(decode(encode(message)), message)
    assert same(decode([memoryview(part) for part in encode(message)]), message)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GenerationError("a"), GenerationError),
        (EngineLostError("b"), EngineLostError),
        (RewardServerError("c"), RewardServerError),
        (ConfigError(["d", "e"]), ReinforceError),  # with its whole text
        (type("OfSomebodyElse", (GenerationError,), {})("f"), ReinforceError),
    ],
)
def test_errors_keep_their_text(error, kind):
    arrived = decode(encode(GeneratorFailed(error)))
    assert isinstance(arrived, GeneratorFailed)
    assert type(arrived.failure) is kind
    assert str(arrived.failure) == str(error)
    result = decode(encode(replace(RESULT, rewards=None, failure=error)))
    assert isinstance(result, GenerationResult)
    assert type(result.failure) is kind
    assert str(result.failure) == str(error)


@pytest.mark.parametrize(
    ("sent", "received"),
    [("rewards.no_answer", "rewards.no_answer"), ("", ""), ("No\nkey", ""), ("a" * 201, "")],
)
def test_errors_keep_their_key(sent, received):
    """A text that cannot be a key of this package's errors is left out."""
    arrived = decode(encode(GeneratorFailed(RewardServerError("c", key=sent))))
    assert isinstance(arrived, GeneratorFailed)
    assert arrived.failure.key == received
    failure = RewardServerError("c", key=sent)
    result = decode(encode(replace(RESULT, rewards=None, failure=failure)))
    assert isinstance(result, GenerationResult)
    assert result.failure is not None
    assert result.failure.key == received


def test_the_text_of_an_error_is_cut():
    arrived = decode(encode(GeneratorFailed(GenerationError("a" * 1_000_000))))
    assert isinstance(arrived, GeneratorFailed)
    assert str(arrived.failure) == "a" * 10_000


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("bomb",)


def changed(**values: Any) -> list[bytes]:
    """Return the result's parts with other fields."""
    text, tensors = encode(RESULT)
    return [json.dumps({**json.loads(text), **values}).encode(), tensors]


def with_dots(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("__", "."): tensor for name, tensor in tensors.items()}


def with_tensors(**tensors: torch.Tensor) -> list[bytes]:
    """Return the result's parts with other tensors; `__` in a name stands for a dot."""
    base = {
        "completions.tokens": torch.zeros(4, 3).long(),
        "completions.lengths": torch.ones(4).long(),
    }
    return [encode(RESULT)[0], save(base | with_dots(tensors))]


def empty_of(*shape: int) -> bytes:
    """The result's tokens in safetensors' format, without bytes and of this shape."""
    values = {"completions.tokens": {"dtype": "I64", "shape": shape, "data_offsets": [0, 0]}}
    header = json.dumps(values).encode()
    return len(header).to_bytes(8, "little") + header


BAD = {
    "pickled": [pickle.dumps(Bomb()), b""],
    "pickled tensors": [encode(RESULT)[0], pickle.dumps(Bomb())],
    "one part": [b"{}"],
    "no parts": [],
    "a number": [b"1", b""],
    "a list": [b"[]", b""],
    "deep": [b"[" * 100_000, b""],
    "no kind": [b"{}", b""],
    "another kind": [b'{"kind": "Bomb"}', b""],
    "a kind that is no text": [b'{"kind": ["GenerationRequests"]}', b""],
    "a field too many": [b'{"kind": "RunEnded", "x": 1}', b""],
    "a field too few": [b'{"kind": "RequestCredit"}', b""],
    "a field of another type": [b'{"kind": "RequestCredit", "count": "many"}', b""],
    "tensors that do not belong": [b'{"kind": "RunEnded"}', save({"a": torch.ones(1)})],
    "no tokens": [encode(RESULT)[0], save({"completions.lengths": torch.ones(4).long()})],
    "no tensors": [encode(RESULT)[0], b""],
    "half of the tensors": [encode(RESULT)[0], encode(RESULT)[1][:-4]],
    "another reason": changed(finish_reasons=["stop"] * 3 + ["?"]),
    "too few reasons": changed(finish_reasons=["stop"] * 3),
    "prompts that are no numbers": changed(prompt_ids=["a"]),
    "tokens that are real": with_tensors(completions__tokens=torch.zeros(4, 3)),
    "tokens of one dimension": with_tensors(completions__tokens=torch.zeros(12).long()),
    "lengths of others": with_tensors(completions__lengths=torch.ones(3).long()),
    "a length beyond the tokens": with_tensors(completions__lengths=torch.tensor([1, 1, 4, 1])),
    "a length below 0": with_tensors(completions__lengths=torch.tensor([1, 1, -1, 1])),
    "log-probs of others": with_tensors(completions__log_probs=torch.zeros(4, 2)),
    "rewards of others": with_tensors(
        rewards__values=torch.zeros(5), rewards__status=torch.zeros(5).int()
    ),
    "rewards without status": with_tensors(rewards__values=torch.zeros(4)),
    "a source that is missing": changed(sources=["accuracy", "c"]),
    "a source of others": with_tensors(
        rewards__values=torch.zeros(4),
        rewards__status=torch.zeros(4).int(),
        rewards__by_source__x=torch.zeros(3),
    ),
    "a shape that torch cannot have": [encode(RESULT)[0], empty_of(0, 2**63)],
    "a kind that is nested": [b'{"kind": ' + b"[" * 900 + b"]" * 900 + b"}", b""],
    "a key that is none": changed(failure={"name": "DataError", "text": "", "key": "a\n"}),
    "a long key": changed(failure={"name": "DataError", "text": "", "key": "a" * 201}),
    "many sources": changed(sources=[str(number) for number in range(1001)]),
    "a source with a long name": changed(sources=["accuracy", "a" * 201]),
    "a long fault": changed(faults={"1": "a" * 10_001}),
    "an unknown tensor": with_tensors(completions__more=torch.zeros(4)),
}


@pytest.mark.parametrize("parts", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused_and_runs_nothing(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadMessageError):
        decode(parts)
    assert not list(tmp_path.iterdir())


def right_but(**tensors: torch.Tensor) -> list[bytes]:
    """Four responses with scores of one source, valid but for these tensors, named as above."""
    text, _ = changed(sources=[], faults={})
    right = {
        "completions.tokens": torch.zeros(4, 3).long(),
        "completions.lengths": torch.ones(4).long(),
        "completions.log_probs": torch.zeros(4, 3),
        "completions.weight_versions": torch.zeros(4, 3).long(),
        "rewards.values": torch.zeros(4),
        "rewards.status": torch.zeros(4).int(),
    }
    return [text, save(right | with_dots(tensors))]


def test_the_result_that_the_next_test_spoils_is_right():
    assert isinstance(decode(right_but()), GenerationResult)


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({"completions__lengths": torch.tensor([1, 1, 4, 1])}, "completions.lengths"),
        ({"completions__lengths": torch.tensor([1, 1, -1, 1])}, "completions.lengths"),
        ({"completions__lengths": torch.ones(3).long()}, "completions.lengths"),
        ({"completions__lengths": torch.ones(4).int()}, "completions.lengths"),
        ({"completions__tokens": torch.zeros(4, 3)}, "completions.tokens"),
        ({"completions__tokens": torch.zeros(12).long()}, "completions.tokens"),
        ({"completions__log_probs": torch.zeros(4, 2)}, "completions.log_probs"),
        ({"completions__weight_versions": torch.zeros(4, 2).long()}, "completions.weight_versions"),
        (
            {"rewards__values": torch.zeros(5), "rewards__status": torch.zeros(5).int()},
            "rewards.values",
        ),
        (
            {"rewards__values": torch.zeros(3), "rewards__status": torch.zeros(3).int()},
            "rewards.values",
        ),
        ({"rewards__status": torch.zeros(5).int()}, "rewards.status"),
        ({"rewards__status": torch.zeros(1).int()}, "rewards.status"),
        ({"rewards__status": torch.zeros(4)}, "rewards.status"),
        ({"rewards__values": torch.zeros(4, 1)}, "rewards.values"),
    ],
)
def test_each_tensor_is_checked_and_named(tensors, field):
    with pytest.raises(BadMessageError, match=field.replace(".", r"\.")):
        decode(right_but(**tensors))
