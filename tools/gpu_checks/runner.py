"""Runs a check in a process of its own with a deadline."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.base import CPU, CUDA, FAIL, FAKE, SKIP, Context, Finding

ROOT = Path(__file__).resolve().parents[2]
PATHS = (ROOT, ROOT / "benchmarks", ROOT / "tools", ROOT / "tests")  # the last for its helpers
WHY_NOT = {FAKE: "numbers are not real here", CPU: "needs a GPU"}


@dataclass(frozen=True)
class Check:
    """A row of the list.

    Attributes:
        name: on the command line and in the report.
        proves: in a few words.
        target: MODULE:FUNCTION, from a `Context` to a `Finding`.
        seconds, least: the process is ended after them; with less than `least` left it is not begun.
        modes: in which it can say something.
        needs: modules that must be there.
        environment: variables that its process has besides.
        options: of the command line, by name.
        enough: seconds after which a check that has not ended has failed, not run out of time; None: `seconds`.
    """

    name: str
    proves: str
    target: str
    seconds: float
    least: float = 10
    modes: Sequence[str] = (CUDA,)
    needs: Sequence[str] = ("megatron.core", "transformers")
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    enough: float | None = None


def run(check: Check, mode: str, folder: Path, left: float) -> Finding:
    """Run a check, unless it cannot be run here, within `left` seconds; `folder` is emptied for it."""
    missing = [name for name in check.needs if not is_installed(name)]
    if mode not in check.modes:
        return Finding(SKIP, WHY_NOT.get(mode, f"not for {mode}"), name=check.name)
    if missing:
        return Finding(SKIP, f"not installed: {', '.join(missing)}", name=check.name)
    if left < check.least:
        return Finding(
            SKIP, f"no time left: {left:.0f} s of at least {check.least:.0f}", name=check.name
        )
    shutil.rmtree(folder, ignore_errors=True)  # a run would go on from an earlier one's checkpoints
    folder.mkdir(parents=True)
    limit = min(check.seconds, left)
    started = time.time()
    code = _run_process(check, Context(mode, folder, started + limit, check.options), limit)
    finding = _finding(check, code, folder, limit)
    finding.name, finding.seconds = check.name, round(time.time() - started, 1)
    if finding.verdict == FAIL:
        finding.numbers["log"] = str(folder / "log.txt")
    else:
        for left_over in filter(Path.is_dir, folder.iterdir()):  # models and checkpoints
            shutil.rmtree(left_over)
    return finding


def _finding(check: Check, code: int | None, folder: Path, limit: float) -> Finding:
    """What the process wrote, or how it ended; a code of None: it was ended here."""
    result = folder / "finding.json"
    if code == 0 and result.exists():
        return Finding(**json.loads(result.read_text(encoding="utf-8")))
    last = (
        (folder / "log.txt").read_text(errors="replace", encoding="utf-8").strip().splitlines()
        or ["it printed nothing"]
    )[-1][:300]
    if code is None:
        is_early = limit < (check.enough or check.seconds)
        return (
            Finding(SKIP, "no time left", {})
            if is_early
            else Finding(FAIL, f"no end within {limit:.0f} s: {last}")
        )
    return Finding(FAIL, f"ended with exit code {code}: {last}")


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def python_path() -> str:
    """Return PYTHONPATH for a process that imports the package, the checks and the tests' helpers."""
    folders = [*map(str, PATHS), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


def _run_process(check: Check, context: Context, limit: float) -> int | None:
    """The exit code; None where the process was ended after `limit` seconds. Its children end with it."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **check.environment,
    }
    environment["PYTHONPATH"] = python_path()
    if context.mode == CPU:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "gpu_checks.worker", check.target, context.mode]
    command += [str(context.folder), str(context.deadline), json.dumps(dict(context.options))]
    with (context.folder / "log.txt").open("w", encoding="utf-8") as log:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": log,
            "start_new_session": True,
        }
        process = subprocess.Popen(command, env=environment, **options)
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                # the group is gone where everything has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
