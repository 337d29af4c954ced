"""Archives of torch.save and pickles that fight whoever reads them."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any


def compressed(content: bytes) -> bytes:
    """What torch.save wrote, with its entries compressed; torch.load reads it all the same."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return packed.getvalue()


def doubled(value: Any, rounds: int) -> Any:
    """A tuple of one tuple twice, and so on: its hash takes 2 ** `rounds` steps."""
    for _ in range(rounds):
        value = (value, value)
    return value


def pickle_of_key(rounds: int) -> bytes:
    """A pickled dictionary of one key, `doubled`; `pickle.dumps` would compute its hash."""
    header = b"\x80\x02"
    key = pickle.dumps(doubled(1, rounds), 2).removeprefix(header).removesuffix(b".")
    return header + b"}" + key + b"K\x01s."  # a dictionary, its key, 1, set
