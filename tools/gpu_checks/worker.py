"""A check's process: python -m gpu_checks.worker MODULE:FUNCTION MODE FOLDER DEADLINE OPTIONS."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from gpu_checks.base import FAKE, Context
from gpu_checks.fakes import machine


def main(target: str, mode: str, folder: str, deadline: str, options: str) -> None:
    module, function = target.split(":")
    context = Context(mode, Path(folder), float(deadline), json.loads(options))
    with machine() if mode == FAKE else contextlib.nullcontext():
        finding = getattr(importlib.import_module(module), function)(context)
    (context.folder / "finding.json").write_text(json.dumps(asdict(finding)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
