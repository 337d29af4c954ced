"""Runs checks one after the other, each in a process of its own with a deadline, within a budget of time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.base import CPU, CUDA, FAIL, FAKE, SKIP, Context

ROOT = Path(__file__).resolve().parents[2]
# Beside the project itself: its benchmarks, these checks, and the fake CUDA of its tests.
PATHS = (ROOT, ROOT / "benchmarks", ROOT / "tools", ROOT / "tests")
WHY_NOT = {FAKE: "numbers are not real here", CPU: "needs a GPU"}


@dataclass(frozen=True)
class Check:
    """A row of the list.

    Attributes:
        name: on the command line and in the report.
        proves: in a few words.
        target: MODULE:FUNCTION, from a `Context` to a `Finding`.
        seconds: its process is ended after them.
        least: seconds without which it is not begun.
        modes: in which it can say something.
        needs: modules that must be there.
        environment: variables that its process has besides.
    """

    name: str
    proves: str
    target: str
    seconds: float
    least: float = 10
    modes: Sequence[str] = (CUDA,)
    needs: Sequence[str] = ("megatron.core", "transformers")
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a check came to, and how long it took."""

    name: str
    verdict: str
    sentence: str
    seconds: float
    numbers: dict[str, Any]


def run(check: Check, mode: str, folder: Path, left: float) -> Outcome:
    """Run a check, unless it cannot be run here.

    Args:
        check: the row.
        mode: see `Context`.
        folder: for its files; made anew.
        left: seconds of the whole budget.
    """
    reason = _reason_to_skip(check, mode, left)
    if reason is not None:
        return Outcome(check.name, SKIP, reason, 0.0, {})
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "finding.json"
    result.unlink(missing_ok=True)
    started = time.time()
    limit = min(check.seconds, left)
    code = _run_process(check, Context(mode, folder, started + limit), limit)
    seconds = time.time() - started
    if code == 0 and result.exists():
        return Outcome(check.name, seconds=seconds, **json.loads(result.read_text()))
    log = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
    last = log[-1][:300] if log else "it printed nothing"
    if code is None and limit < check.seconds:
        return Outcome(check.name, SKIP, f"no time left: ended after {seconds:.0f} s ({last})", seconds, {})
    how = f"did not end within {limit:.0f} s" if code is None else f"ended with exit code {code}"
    return Outcome(check.name, FAIL, f"{how}: {last}", seconds, {"log": str(folder / "log.txt")})


def _reason_to_skip(check: Check, mode: str, left: float) -> str | None:
    if mode not in check.modes:
        return WHY_NOT.get(mode, f"not for {mode}")
    missing = [name for name in check.needs if not _is_installed(name)]
    if missing:
        return f"{', '.join(missing)} cannot be imported: not installed"
    return f"no time left: {left:.0f} s, and it takes {check.least:.0f} at least" if left < check.least else None


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _run_process(check: Check, context: Context, limit: float) -> int | None:
    """The exit code; None where the process was ended after `limit` seconds. All its children end with it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **check.environment}
    paths = [*map(str, PATHS), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if context.mode == CPU:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "gpu_checks.worker", check.target]
    command += [context.mode, str(context.folder), str(context.deadline)]
    with (context.folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group is gone where everything has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For the file."""
    return [asdict(outcome) for outcome in outcomes]
