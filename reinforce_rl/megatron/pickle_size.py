"""Bounds the work of unpickling bytes that somebody else may have made, before they are unpickled.

A pickle of a hundred bytes can hold a tuple that names another one twice, which names a third one twice, and so on
forty times. Computing its hash would not end, and nothing can interrupt it.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterable

from reinforce_rl.errors import CheckpointError

# Values that a pickle may count for each of its instructions. A value counts with all that it holds, in each value
# that holds it; a checkpoint's description has about ten levels.
WORK_PER_OPCODE = 50
_MIN_WORK = 100_000
_MAX_BITS = 64  # of an integer; the hashes of longer ones can be costly, and can all be equal
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GLOBALS = frozenset({"GLOBAL", "STACK_GLOBAL"})
# They change the value below what they take, and leave it on the stack.
_ADDS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
# A pickle of acyclic values needs none of them, and CPython's POP removes a mark or a value.
_UNUSED = frozenset({"POP", "POP_MARK", "DUP"})


def check_pickle_size(data: bytes) -> None:
    """Raise CheckpointError if the values of a pickle are far larger than the pickle, or it is damaged.

    Args:
        data: a pickle of any protocol, which is not executed.
    """
    try:
        _check(data)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"its pickle is damaged ({error})") from error


class _Value:
    __slots__ = ("may_change", "size")

    def __init__(self, size: int = 1, may_change: bool = True):
        self.size = size  # 1 and the sizes of all values that it holds
        self.may_change = may_change  # until another value holds it; a class or function of the program never


def _check(data: bytes) -> None:
    stack: list[_Value] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, _Value] = {}
    work = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data)), 1):
        name = opcode.name
        if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
            raise CheckpointError(f"it has an integer of {argument.bit_length()} bits")
        if name in _UNUSED:
            raise CheckpointError(f"its pickle has a {name}, which no checkpoint needs")
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
            added = 0
            for value in taken:
                value.may_change = False
                added += value.size
            work += added
            if changed is None:
                stack.extend(_Value(1 + added, name not in _GLOBALS) for _ in opcode.stack_after)
            else:
                # The sizes of the values that hold it have been computed already.
                if not changed.may_change:
                    raise CheckpointError("it changes a value that another one holds")
                changed.size += added
                stack.append(changed)
        if work > _MIN_WORK and work > WORK_PER_OPCODE * count:
            raise CheckpointError("its values hold each other so often that reading them would not end")


def _take(stack: list[_Value], marks: list[int], before: Iterable[pickletools.StackObject]) -> list[_Value]:
    """Remove from the stack what an instruction takes, and return it."""
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
