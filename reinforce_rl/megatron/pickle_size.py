"""Bounds the work of unpickling bytes that somebody else may have made, before they are unpickled.

A pickle can name one tuple twice in the next, forty times over: a hundred bytes, whose hash takes for ever within the
interpreter, where nothing can end it.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterable

from reinforce_rl.errors import CheckpointError

# Values that a pickle may count for each of its instructions. A value counts with all that it holds, in each value
# that holds it; in a checkpoint's description that is at most some ten levels.
WORK_PER_OPCODE = 50
_MIN_WORK = 100_000
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
# They change the value below what they take, and leave it on the stack.
_ADDS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})


def check_pickle_size(data: bytes) -> None:
    """Raise CheckpointError if the values of a pickle are far larger than the pickle, or it is damaged.

    Args:
        data: a pickle of any protocol, which is not executed.
    """
    try:
        _count(data)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"its pickle is damaged ({error})") from error


class _Value:
    __slots__ = ("is_held", "size")

    def __init__(self, size: int = 1):
        self.size = size  # 1 and the sizes of all that it holds
        self.is_held = False  # by another value


def _count(data: bytes) -> None:
    stack: list[_Value] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, _Value] = {}
    work = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data)), 1):
        name = opcode.name
        if name in _GETS:
            assert argument is not None
            stack.append(memo[argument])
        elif name in _PUTS:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            taken = _take(stack, marks, opcode.stack_before)
            changed = taken.pop(0) if name in _ADDS else None
            added = 0
            for value in taken:
                value.is_held = True
                added += value.size
            work += added
            if changed is None:
                stack.extend(_Value(1 + added) for _ in opcode.stack_after)
            else:
                # The sizes of those that hold it are known already.
                if changed.is_held:
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
    if height < 0:
        raise ValueError("an instruction finds too few values")
    taken = stack[height:]
    del stack[height:]
    return taken
