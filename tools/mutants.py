"""Change one line of the package at a time and see whether fast tests notice.

python tools/mutants.py

tools/mutants.toml has the changes (mutants), by file, each with its kind and the tests that must
fail. Every mutant is applied to a copy of the tree in a temporary folder; this tree is never
written to. The tests run on the unchanged copy first, where they must pass. A mutant is killed if a
test fails, or if the tests take longer than --seconds, which is counted separately. A mutant whose
tests end by a signal is not killed: the machine may lack memory. Prints a table; --out FOLDER
writes it as mutants.json and mutants.md. Ends with 1 if less than 90 % are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "mutants.toml"
COPIED = (
    "reinforce_rl",
    "tests",
    "conf",
    "examples",
    "docs",
    "slurm",
    "recipes",
    "tools",
    "pyproject.toml",
    "README.md",
)
LEAST_KILLED = 0.9
FAST = "not more and not slow and not gpu and not engine and not slurm"  # tests
BASELINE_SECONDS = 1800
# Exit statuses of pytest; the second one where the changed module cannot be imported.
_TESTS_FAILED = 1
_NOT_COLLECTED = 2
# Loaded once in a server process; each run of tests is a fork of it, which saves most of its time.
PRELOADED = [
    "pytest",
    "hypothesis",
    "torch",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing.strategies.torch",
    "transformers.tokenization_utils_base",
    "hydra",
    "omegaconf",
    "pydantic",
    "pyarrow",
    "rich.table",
    "aiohttp",
    "psutil",
    "zmq",
]


@dataclass(frozen=True)
class Mutant:
    """One change of a file. `old` occurs exactly once in it."""

    file: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]  # node ids, one of which must fail
    survives: str = ""  # why no fast test can fail; empty: one does


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str  # "killed", "killed by the deadline", "survived" or "ended by signal N"
    seconds: float
    failed: str  # first test that failed

    @property
    def is_killed(self) -> bool:
        return self.verdict.startswith("killed")


def read_table(path: Path = TABLE) -> list[Mutant]:
    # Python 3.10 has no parser; pytest brings the same one there.
    tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants: list[Mutant] = []
    for section in table["file"]:
        file = section["path"]
        for row in section["mutant"]:
            tests = tuple(row.get("tests", section["tests"]))
            survives = row.get("survives", "")
            mutant = Mutant(file, row["kind"], row["old"], row["new"], tests, survives)
            mutants.append(mutant)
    return mutants


def stale_rows(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Return a sentence for each row that does not fit the tree.

    Its text is not there exactly once, or a test is missing.
    """
    errors: list[str] = []
    texts: dict[str, str] = {}
    for mutant in mutants:
        path = root / mutant.file
        if not path.is_file():
            errors.append(f"{mutant.file}: no such file")
            continue
        source = texts.setdefault(mutant.file, path.read_text(encoding="utf-8"))
        count = source.count(mutant.old)
        if count != 1:
            errors.append(f"{mutant.file}: {mutant.old!r} occurs {count} times, expected once")
        elif not _compiles(source.replace(mutant.old, mutant.new), mutant.file):
            errors.append(f"{mutant.file}: {mutant.new!r} is no Python there")
        if mutant.old == mutant.new:
            errors.append(f"{mutant.file}: {mutant.old!r} is replaced by itself")
        for test in mutant.tests:
            file, *names = test.split("::")
            test_path = root / file
            if not test_path.is_file():
                errors.append(f"{mutant.file}: its test file {file} does not exist")
                continue
            test_source = texts.setdefault(file, test_path.read_text(encoding="utf-8"))
            for name in names:
                bare_name = name.partition("[")[0]
                if (
                    f"def {bare_name}(" not in test_source
                    and f"class {bare_name}" not in test_source
                ):
                    errors.append(f"{mutant.file}: its test {test} does not exist")
    return errors


def _compiles(source: str, name: str) -> bool:
    try:
        compile(source, name, "exec")
    except SyntaxError:
        return False
    return True


def copy_tree(target: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skipped, symlinks=True)
        elif source.exists():
            shutil.copy2(source, target / name)
    for name in (".venv", ".cache"):  # environments and the model of the tests
        if (ROOT / name).exists():
            (target / name).symlink_to((ROOT / name).resolve())


def _run_tests(root: str, tests: Sequence[str], log: str) -> None:
    """Run tests in a separate tree and process; its exit status is pytest's."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = root
    sys.path.insert(0, root)
    import pytest

    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", FAST]
    status = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(status))


def _await_tests(root: Path, tests: Sequence[str], seconds: float, log: Path) -> int | None:
    """Return pytest's exit status; None if the tests did not end in time."""
    context = multiprocessing.get_context("forkserver")
    arguments = (str(root), list(tests), str(log))
    process = context.Process(target=_run_tests, args=arguments)
    process.start()
    process.join(seconds)
    has_ended = process.exitcode is not None
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what the tests started ends, too
    process.join()
    return process.exitcode if has_ended else None


def _forget_bytecode(path: Path) -> None:
    # Python takes the old bytecode where a file of the same size was written within the same
    # second.
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink()


def _first_failed(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split()[1]
    return ""


def check_baseline(tree: Path, mutants: Sequence[Mutant]) -> None:
    """Raise SystemExit unless the selected tests pass on the unchanged tree."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    log = tree / "baseline.log"
    status = _await_tests(tree, tests, BASELINE_SECONDS, log)
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        ending = "\n".join(lines[-30:])
        raise SystemExit(
            f"error: on the unchanged tree the tests end with {status}, expected 0:\n{ending}"
        )


def run_mutant(tree: Path, mutant: Mutant, seconds: float) -> Outcome:
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    log = tree / "mutant.log"
    began = time.monotonic()
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    _forget_bytecode(path)
    try:
        status = _await_tests(tree, mutant.tests, seconds, log)
    finally:
        path.write_text(source, encoding="utf-8")
        _forget_bytecode(path)
    took = time.monotonic() - began
    if status is None:
        return Outcome(mutant, "killed by the deadline", took, "")
    if status == 0:
        return Outcome(mutant, "survived", took, "")
    if status < 0:
        return Outcome(mutant, f"ended by signal {-status}", took, "")
    if status not in (_TESTS_FAILED, _NOT_COLLECTED):  # such as no test, or a wrong option
        raise SystemExit(
            f"error: {describe(mutant)}: pytest ended with {status}, expected 0 to 2; see {log}"
        )
    return Outcome(mutant, "killed", took, _first_failed(log))


def run_all(
    mutants: Sequence[Mutant], jobs: int, seconds: float, say: Callable[[str], object]
) -> list[Outcome]:
    """Run every mutant, `jobs` at a time, each job in its own copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [Path(scratch) / str(job) for job in range(jobs)]
        for tree in trees:
            tree.mkdir()
            copy_tree(tree)
        check_baseline(trees[0], mutants)
        say("the tests pass on the unchanged tree")

        def run_share(job: int) -> dict[int, Outcome]:
            outcomes: dict[int, Outcome] = {}
            for number in range(job, len(mutants), jobs):
                mutant = mutants[number]
                outcome = run_mutant(trees[job], mutant, seconds)
                outcomes[number] = outcome
                say(f"{outcome.verdict:10} {outcome.seconds:5.1f} s  {describe(mutant)}")
            return outcomes

        by_number: dict[int, Outcome] = {}
        with ThreadPoolExecutor(jobs) as pool:
            for outcomes in pool.map(run_share, range(jobs)):
                by_number |= outcomes
    return [by_number[number] for number in range(len(mutants))]


def describe(mutant: Mutant) -> str:
    old = " ".join(mutant.old.split())
    new = " ".join(mutant.new.split()) or "(deleted)"
    return f"{mutant.kind}: {mutant.file}: {old} -> {new}"


def share_killed(outcomes: Sequence[Outcome]) -> float:
    num_killed = sum(outcome.is_killed for outcome in outcomes)
    return num_killed / len(outcomes)


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    of_kind: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    late: Counter[str] = Counter()
    for outcome in outcomes:
        kind = outcome.mutant.kind
        of_kind[kind] += 1
        killed[kind] += outcome.is_killed
        late[kind] += outcome.verdict == "killed by the deadline"
    lines = ["| kind | mutants | killed | of these by the deadline |", "|---|---|---|---|"]
    for kind, count in of_kind.items():
        lines.append(f"| {kind} | {count} | {killed[kind]} | {late[kind]} |")
    share = f"{killed.total()} ({share_killed(outcomes):.0%})"
    lines.append(f"| all | {len(outcomes)} | {share} | {late.total()} |")
    survivors = [outcome.mutant for outcome in outcomes if not outcome.is_killed]
    if survivors:
        lines += ["", "| survivor | why |", "|---|---|"]
    for mutant in survivors:
        text = describe(mutant).replace("|", "\\|")
        lines.append(f"| `{text}` | {mutant.survives or 'not explained'} |")
    return "\n".join(lines) + "\n"


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        result = {
            "verdict": outcome.verdict,
            "seconds": round(outcome.seconds, 1),
            "failed": outcome.failed,
        }
        rows.append({**asdict(outcome.mutant), **result})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="KIND|FILE", help="mutants of these kinds and files alone"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="mutants that are run at the same time"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="deadline of a mutant's tests (default: 120)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for mutants.json and mutants.md"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument(
        "--check", action="store_true", help="check that the table fits the tree and run nothing"
    )
    options = parser.parse_args(arguments)
    mutants = read_table()
    if options.only:
        wanted = set(options.only)
        mutants = [mutant for mutant in mutants if mutant.kind in wanted or mutant.file in wanted]
        if not mutants:
            kinds = ", ".join(sorted({mutant.kind for mutant in read_table()}))
            selection = " ".join(options.only)
            parser.error(f"--only {selection} selects nothing; kinds are {kinds}")
    if options.list:
        print("\n".join(map(describe, mutants)))
        return 0
    if errors := stale_rows(mutants):
        print("error: tools/mutants.toml is stale:", *errors, sep="\n  ", file=sys.stderr)
        return 1
    if options.check:
        print(f"{len(mutants)} mutants fit the tree")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    outcomes = run_all(mutants, options.jobs, options.seconds, lambda line: print(line, flush=True))
    text = as_markdown(outcomes)
    print(f"\n{text}", end="")
    if options.out is not None:
        out = options.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "mutants.md").write_text(text, encoding="utf-8")
        content = json.dumps(as_json(outcomes), indent=1) + "\n"
        (out / "mutants.json").write_text(content, encoding="utf-8")
    return 0 if share_killed(outcomes) >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
