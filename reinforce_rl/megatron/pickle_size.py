"""Bounds the work of unpickling untrusted bytes, before they are unpickled.

A pickle of a hundred bytes can hold a tuple that refers to another one twice, which refers to a
third one twice, and so on forty times. Computing its hash would not end, and nothing can interrupt
it.

Keys of a dictionary with equal hashes are all compared with one another. Hashes of texts are random
in each process, but many numbers or tuples with equal hashes can be prepared.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Collection, Iterable, Sequence

from reinforce_rl.errors import CheckpointError

# Values that may be counted for each instruction of a pickle. A value counts with all its contents
# in each value that holds it; a checkpoint's description has about ten levels.
WORK_PER_OPCODE = 50
_MIN_WORK = 100_000
_MAX_BITS = 64  # of an integer; hashes of longer integers can be costly, and can all be equal
_MAX_NUMBER_KEYS = 1 << 15  # in all dictionaries and sets
_TEXTS = (pickletools.pyunicode, pickletools.pybytes_or_str, pickletools.pybytes)
_NUMBERS = (
    pickletools.pyint,
    pickletools.pyinteger_or_bool,
    pickletools.pybool,
    pickletools.pynone,
)
_ORDERED = "collections OrderedDict"
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GLOBALS = frozenset({"GLOBAL", "STACK_GLOBAL"})
# They change the value below their arguments, and leave it on the stack.
_ADDS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
# A pickle of acyclic values needs none of these. CPython's POP removes a mark or a value.
_UNUSED = frozenset({"POP", "POP_MARK", "DUP"})


def check_pickle_size(data: bytes, *, key_classes: Collection[str] = ()) -> None:
    """Raise CheckpointError if a pickle is damaged, or takes far too much time or memory to read.

    Args:
        data: a pickle of any protocol, which is not executed.
        key_classes: classes, as "module name", whose instances may be keys, besides texts and whole
            numbers. The caller has to check their hashes.
    """
    try:
        _check(data, key_classes)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"its pickle is damaged ({error})",
            key="checkpoint.pickle.damaged",
        ) from error


class _Value:
    __slots__ = ("kind", "may_change", "name", "size")

    def __init__(
        self,
        size: int,
        kind: pickletools.StackObject,
        name: str,
        may_change: bool,
    ):
        self.kind = kind
        self.name = name  # "module name" of a class and of its instances; the text of a text
        self.size = size  # 1 and the sizes of all values that it holds
        # True until another value holds it. Always False for a class or function of the program.
        self.may_change = may_change


def _check(data: bytes, key_classes: Collection[str]) -> None:
    stack: list[_Value] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, _Value] = {}
    work = 0
    number_keys = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data)), 1):
        name = opcode.name
        if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
            raise CheckpointError(
                f"it has an integer of {argument.bit_length()} bits; expected at most {_MAX_BITS}",
                key="checkpoint.pickle.long_integer",
            )
        if name in _UNUSED:
            raise CheckpointError(
                f"its pickle has the instruction {name}, which no checkpoint needs",
                key="checkpoint.pickle.other_instruction",
            )
        if name in _GETS:
            assert argument is not None
            stack.append(memo[argument])
        elif name in _PUTS:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        else:
            taken = _take(stack, marks, opcode.stack_before)
            changed = taken.pop(0) if name in _ADDS else None
            _check_calls(name, changed, taken)
            keys = _keys_of(name, taken)
            _check_keys(keys, key_classes)
            number_keys += sum(key.kind in _NUMBERS for key in keys)
            if number_keys > _MAX_NUMBER_KEYS:
                raise CheckpointError(
                    f"it has more than {_MAX_NUMBER_KEYS} keys that are numbers",
                    key="checkpoint.pickle.too_many_numbers",
                )
            added = 0
            for value in taken:
                value.may_change = False
                added += value.size
            work += added
            if changed is None:
                called = _name_of(name, argument, taken)
                may_change = name not in _GLOBALS
                for kind in opcode.stack_after:
                    stack.append(_Value(1 + added, kind, called, may_change))
            else:
                # The sizes of the values that hold it have been computed already.
                if not changed.may_change:
                    raise CheckpointError(
                        "it changes a value after another one holds it",
                        key="checkpoint.pickle.late_change",
                    )
                changed.size += added
                stack.append(changed)
        if work > _MIN_WORK and work > WORK_PER_OPCODE * count:
            raise CheckpointError(
                "its values refer to each other so often that reading them would not finish",
                key="checkpoint.pickle.endless",
            )


def _name_of(opcode: str, argument: object, taken: Sequence[_Value]) -> str:
    if isinstance(argument, str):
        return argument
    if opcode == "STACK_GLOBAL":
        return f"{taken[0].name} {taken[1].name}"
    return taken[0].name if taken else ""


def _keys_of(opcode: str, taken: Sequence[_Value]) -> Sequence[_Value]:
    """Return the values whose hashes an instruction computes."""
    if opcode in ("SETITEM", "SETITEMS", "DICT"):
        return taken[::2]
    if opcode in ("ADDITEMS", "FROZENSET"):
        return taken
    return ()


def _check_keys(keys: Iterable[_Value], classes: Collection[str]) -> None:
    for key in keys:
        is_plain = key.kind in _TEXTS or key.kind in _NUMBERS
        is_instance = key.kind is pickletools.anyobject and key.name in classes
        if not (is_plain or is_instance):
            kind = key.kind.name
            raise CheckpointError(
                f"it has a key of the kind {kind!r}; expected strings and whole numbers",
                key="checkpoint.pickle.other_key",
            )


def _check_calls(opcode: str, changed: _Value | None, taken: Sequence[_Value]) -> None:
    """Refuse calls that build a dictionary from pairs, since its keys would not be checked."""
    if opcode == "REDUCE" and taken[0].name == _ORDERED and taken[1].size > 1:
        raise CheckpointError(
            "it calls OrderedDict with values, which no checkpoint needs",
            key="checkpoint.pickle.filled_by_call",
        )
    takes_pairs = changed is not None and changed.name in (_ORDERED, "")
    if opcode == "BUILD" and takes_pairs and taken[0].kind is not pickletools.pydict:
        raise CheckpointError(
            "it sets attributes from a value that is not a dictionary",
            key="checkpoint.pickle.attributes_of_pairs",
        )


def _take(
    stack: list[_Value], marks: list[int], before: Iterable[pickletools.StackObject]
) -> list[_Value]:
    """Remove the arguments of an instruction from the stack, and return them."""
    kinds = list(before)
    if pickletools.markobject in kinds:
        height = marks.pop() - kinds.index(pickletools.markobject)
    else:
        height = len(stack) - len(kinds)
        # The real stack of an instruction ends at the last mark.
        if marks and height < marks[-1]:
            raise ValueError("an instruction reaches below a mark")
    if height < 0:
        raise ValueError("an instruction finds too few values")
    taken = stack[height:]
    del stack[height:]
    return taken
