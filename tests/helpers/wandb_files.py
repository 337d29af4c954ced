"""Read wandb's offline files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK = 32768
FULL = 1
LAST = 4


def read_offline_file(path: Path) -> Iterator:
    """Yield the records of a `.wandb` file.

    It has a 7-byte header, followed by LevelDB's log format with protobuf payloads. wandb 0.31 has
    no Python reader.
    """
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    offset = 7
    parts = []
    while offset + 7 <= len(data):
        left = BLOCK - offset % BLOCK
        if left < 7:  # a header never spans blocks
            offset += left
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, offset)
        parts.append(data[offset + 7 : offset + 7 + length])
        offset += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def offline_files(folder: Path) -> list[Path]:
    import wandb

    # as at the end of the process; finish() may return before wandb's service has written
    # everything
    wandb.teardown()
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def history(path: Path) -> dict[int, dict]:
    steps: dict[int, dict] = {}
    for record in read_offline_file(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            steps.setdefault(items["_step"], {}).update(items)
    return steps
