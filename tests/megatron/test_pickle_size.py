"""The memory that a pickle needs is known before it is loaded."""

from __future__ import annotations

import io
import itertools
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from helpers.archives import doubled, equal_hashes, pickle_of_key
from helpers.errors import raises_error
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from reinforce_rl.megatron.pickle_size import check_pickle_size


def nested_index(rounds: int) -> Any:
    """Return an object whose hash is computed from its fields."""
    index = MetadataIndex("a")
    for _ in range(rounds):
        index = MetadataIndex((index, index))  # type: ignore[arg-type]
    return index


def test_its_key_would_be_hashed_for_ever() -> None:
    """`pickle.loads` would not terminate."""
    assert pickle.loads(pickle_of_key(3)) == {doubled(1, 3): 1}
    with raises_error("checkpoint.pickle.endless"):
        check_pickle_size(pickle_of_key(60))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value", [doubled(1, 60), [doubled("a", 60)], {"a": doubled((), 60)}, nested_index(60)]
)
def test_values_that_hold_each_other_are_refused(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert len(data) < 30_000
    with raises_error("checkpoint.pickle.endless"):
        check_pickle_size(data)


def test_values_that_grow_after_they_were_taken_are_refused() -> None:
    lists: list[Any] = [[] for _ in range(60)]
    names = dict(enumerate(lists))  # all of them are in the memo before a list grows
    for inner, outer in itertools.pairwise(lists):
        outer += [inner, inner]
    with raises_error("checkpoint.pickle.endless"):
        check_pickle_size(pickle.dumps([names, lists]))
    # By hand: the list is put into the memo, then into a tuple, and is filled afterwards.
    with raises_error("checkpoint.pickle.late_change"):
        check_pickle_size(b"\x80\x02]q\x00\x85h\x00K\x01a\x86.")


def test_a_key_used_again_and_again_is_refused() -> None:
    key = tuple(range(100_000))
    with raises_error("checkpoint.pickle.endless"):
        check_pickle_size(pickle.dumps([[key, index] for index in range(1000)]))


def with_attribute(attributes: object) -> bytes:
    """Pickle an OrderedDict with attributes that torch would update from any pairs."""
    header = b"\x80\x02"
    state = pickle.dumps(attributes, 2).removeprefix(header).removesuffix(b".")
    return header + b"ccollections\nOrderedDict\n)R" + state + b"b."


def test_hashes_of_pairs_are_equal_and_each_is_compared() -> None:
    """Proves that the next test can fail."""
    pairs = equal_hashes(100)
    assert len(set(pairs)) == 100
    assert len({hash(pair) for pair in pairs}) == 1


PAIR = (1, 2)
DICTIONARIES = [
    {PAIR: 1},
    {torch.Size(PAIR): 1},
    {1.5: 1},
    {1j: 1},
    {frozenset([1]): 1},
    {MetadataIndex("a", torch.Size(PAIR)): 1},
    [{"a": {PAIR: 1}}],
    OrderedDict({PAIR: 1}),
]
# Below protocol 4, a set is created from a list by a call; a checkpoint may not name its class.
SETS = [{PAIR}, frozenset([PAIR])]
CASES = [*itertools.product(DICTIONARIES, range(6)), *itertools.product(SETS, range(4, 6))]


@pytest.mark.parametrize(("value", "protocol"), CASES)
def test_keys_whose_hashes_can_be_made_equal_are_refused(value: Any, protocol: int) -> None:
    with raises_error("checkpoint.pickle.other_key"):
        check_pickle_size(pickle.dumps(value, protocol))


# torch calls OrderedDict with the pickle's arguments.
CALL_WITH_PAIRS = b"\x80\x02ccollections\nOrderedDict\n]K\x01K\x02\x86K\x03\x86a\x85R."


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (CALL_WITH_PAIRS, "checkpoint.pickle.filled_by_call", "OrderedDict"),
        (with_attribute([(PAIR, 1)]), "checkpoint.pickle.attributes_of_pairs", ""),
        (with_attribute((("a", PAIR), ("b", PAIR))), "checkpoint.pickle.attributes_of_pairs", ""),
        (with_attribute({PAIR: 1}), "checkpoint.pickle.other_key", "'tuple'"),
        (b"(K\x01K\x02\x86K\x03d.", "checkpoint.pickle.other_key", "'tuple'"),
    ],
)
def test_other_ways_to_such_keys_are_refused(data: bytes, key: str, value: str) -> None:
    with raises_error(key, value):
        check_pickle_size(data)


def test_torch_takes_pairs_as_attributes() -> None:
    file = io.BytesIO()
    torch.save({}, file)
    with zipfile.ZipFile(file) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as new:
        for name, content in entries.items():
            pairs = with_attribute([(PAIR, 1)])
            new.writestr(name, pairs if name.endswith("data.pkl") else content)
    changed.seek(0)
    assert vars(torch.load(changed, weights_only=True)) == {PAIR: 1}


def test_a_state_dictionary_with_its_attributes_passes() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    assert isinstance(state, OrderedDict)
    check_pickle_size(pickle.dumps(OrderedDict(a=1), 2))
    check_pickle_size(with_attribute({"_metadata": OrderedDict()}))


def test_keys_that_are_numbers_are_bounded() -> None:
    """An attacker can choose many keys that collide along a whole table."""
    many = [{number: None for number in range(1 << 14)}, set(range(1 << 14))]
    check_pickle_size(pickle.dumps(many, 4))
    with raises_error("checkpoint.pickle.too_many_numbers", 32768):
        check_pickle_size(pickle.dumps([*many, {None: 1}], 4))
    check_pickle_size(pickle.dumps({str(number): 1 for number in range(100_000)}))


def test_a_class_that_the_caller_names_may_be_a_key() -> None:
    name = "torch.distributed.checkpoint.metadata MetadataIndex"
    for protocol in range(2, 6):
        data = pickle.dumps({MetadataIndex("a", torch.Size(PAIR)): 1}, protocol)
        check_pickle_size(data, key_classes=(name,))
    with raises_error("checkpoint.pickle.other_key", "'tuple'"):
        check_pickle_size(pickle.dumps({PAIR: name}), key_classes=(name,))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        list(range(100_000)),
        {str(index): (index, index) for index in range(10_000)},
        {index for index in range(10_000)},
        [
            ("a", b"b", 1.5, None, True, 2**63 - 1, -1),
            frozenset((1, 2)),
            bytearray(b"x"),
            {},
            (),
            [],
        ],
        [
            [ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([8, 64])), MetadataIndex("a", [i])]
            for i in range(2000)
        ],
        [doubled(1, 8)] * 40,
    ],
)
def test_other_values_pass(value: Any, protocol: int) -> None:
    check_pickle_size(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (b"\x80\x02N(0.", "checkpoint.pickle.other_instruction", "POP"),  # CPython removes the mark
        (b"\x80\x02N(N1.", "checkpoint.pickle.other_instruction", "POP_MARK"),
        (b"\x80\x02N2\x86.", "checkpoint.pickle.other_instruction", "DUP"),
        (pickle.dumps(2**64), "checkpoint.pickle.long_integer", 65),
        (pickle.dumps({2**100: 1}, 0), "checkpoint.pickle.long_integer", 101),
        # It sets an attribute of a class.
        (
            b"\x80\x02cbuiltins\nint\nN}X\x01\0\0\0aK\x01s\x86b.",
            "checkpoint.pickle.late_change",
            "",
        ),
        (b"\x80\x02K\x01(K\x02\x86.", "checkpoint.pickle.damaged", ""),
    ],
)
def test_what_no_checkpoint_needs_is_refused(data: bytes, key: str, value: object) -> None:
    with raises_error(key, value):
        check_pickle_size(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"\x80\x04s.", b"\x80\x04h\x05.", b"\x80\x04u.", b"\x80\x04\x85."]
)
def test_a_damaged_one_is_refused(data: bytes) -> None:
    with raises_error("checkpoint.pickle.damaged"):
        check_pickle_size(data)
