"""Rehearse a GPU session on a CPU, with exactly the GPU image's packages: python tools/rehearse.py

Makes .venv-image (constraints/gpu-image.txt) and .wheels-image (the wheels that the image lacks),
installs the wheels without an index, and runs the commands of a GPU session. Prints a table with a
row for each step, and writes it to OUT/table.md; each step's output is in OUT/NAME.log. Ends with 1
if a step failed. Run it with the Python of the project's environment. It reads PIP_ARGS,
TORCH_INDEX_URL and IMAGE_PYTHON, as the head of the Makefile explains. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from make_environment import ENVIRONMENTS, find_interpreter, make, python_of
from make_wheelhouse import requirements_in

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ENVIRONMENTS["image"]
ENVIRONMENT = ROOT / ".venv-image"
WHEELS = ROOT / ".wheels-image"
MEBIBYTE = 2**20
LIMIT_MIB = 60  # a GPU machine takes 64 MiB of files: the tree and the carried folders together
COMPARED = ("torch", "numpy", "transformers")
NO_TIME = "no time left"  # of gpu_check's report
# Single-process tests of what runs on a GPU machine; servers, Slurm, engines and peers are not
# there.
UNIT_TESTS = (
    "tests/policy",
    "tests/algorithm",
    "tests/data",
    "tests/generation",
    "tests/megatron",
    "tests/tools/test_gpu_check.py",
)
IN_PROCESS = "not slow and not gpu and not engine and not slurm"


@dataclass(frozen=True)
class Counts:
    passed: int
    failed: int
    skipped: int


@dataclass(frozen=True)
class Step:
    """What is run in the image's environment.

    Attributes:
        command: after the interpreter; "{out}" is the folder of the report.
        seconds: the step is ended after them, and has failed.
        report: the file below the folder that `count` reads.
    """

    name: str
    command: Sequence[str]
    seconds: float
    report: str
    count: Callable[[Path], Counts]
    is_fake: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    step: str
    summary: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def count_checks(path: Path) -> Counts:
    """Count gpu_check's verdicts; a check, or a part of one, without time left has failed."""
    checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
    late = [NO_TIME in json.dumps(check) for check in checks]
    verdicts = []
    for check, is_late in zip(checks, late, strict=True):
        verdicts.append("FAIL" if is_late else check["verdict"])
    counts = Counter(verdicts)
    return Counts(counts["PASS"], counts["FAIL"], counts["SKIP"])


def count_tests(path: Path) -> Counts:
    """Count the tests of a JUnit report, as `pytest --junitxml` writes it."""
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    tests = 0
    failed = 0
    skipped = 0
    for suite in suites:
        tests += int(suite.attrib["tests"])
        failed += int(suite.attrib["failures"])
        failed += int(suite.attrib["errors"])
        skipped += int(suite.attrib["skipped"])
    return Counts(tests - failed - skipped, failed, skipped)


def pytest_command(workers: int, *arguments: str) -> list[str]:
    options = ["-q", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    return ["-m", "pytest", *options, "--junitxml", "{out}/tests.xml", *arguments]


def steps(workers: int) -> list[Step]:
    # Each check has its own limit; together they may take longer than on a GPU.
    check = ["tools/gpu_check.py", "--minutes", "30", "--out", "{out}"]
    fake_cuda = pytest_command(workers, "-m", "not slow and not engine", "tests/fake_cuda")
    unit = pytest_command(workers, "-m", IN_PROCESS, *UNIT_TESTS)
    check_cpu = [*check, "--device", "cpu"]
    check_fake = [*check, "--fake"]
    return [
        Step("check-cpu", check_cpu, 1800, "report.json", count_checks),
        Step("check-fake", check_fake, 1800, "report.json", count_checks),
        Step("fake-cuda", fake_cuda, 2400, "tests.xml", count_tests, is_fake=True),
        Step("unit", unit, 3600, "tests.xml", count_tests),
    ]


def tree_files(root: Path) -> list[Path]:
    """Return the files that git tracks or does not ignore: what is carried to the machine."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout
    names = listing.split(b"\0")
    paths = {root / os.fsdecode(name) for name in names if name}
    files = []
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink():
            files.append(path)
    return files


def size_row(tree: Sequence[Path], wheels: Sequence[Path], limit_mib: float = LIMIT_MIB) -> Row:
    """Judge the size of what is carried."""
    tree_mib = mebibytes(tree)
    wheels_mib = mebibytes(wheels)
    total = tree_mib + wheels_mib
    summary = f"tree {tree_mib:.1f} MiB, wheels {wheels_mib:.1f} MiB: "
    summary += f"{total:.1f} of at most {limit_mib:g} MiB"
    if total < limit_mib:
        return Row("size", summary, passed=1)
    return Row("size", summary, failed=1)


def mebibytes(paths: Sequence[Path]) -> float:
    size = sum(path.stat().st_size for path in paths)
    return size / MEBIBYTE


def versions_there(python: Path) -> dict[str, str]:
    """Return the versions of Python and of the packages that are compared."""
    code = (
        "import json, platform; from importlib.metadata import version; "
        f"versions = {{name: version(name) for name in {COMPARED!r}}}; "
        "print(json.dumps({'Python': platform.python_version(), **versions}))"
    )
    output = subprocess.check_output(
        [python, "-I", "-c", code], text=True, encoding="utf-8", timeout=240
    )
    return json.loads(output)


def differences(
    versions: dict[str, str], pins: dict[str, str], python: tuple[int, int]
) -> list[str]:
    """Return what is not as in the image; a build's label, such as +cpu, does not count."""
    lines = []
    wanted_python = ".".join(map(str, python))
    python_version = versions["Python"]
    release = python_version.split(".")[:2]
    if ".".join(release) != wanted_python:
        lines.append(f"Python {python_version} for {wanted_python}")
    for name in COMPARED:
        version = versions[name]
        pin = pins[name]
        without_label, _, _ = version.partition("+")
        if without_label != pin:
            lines.append(f"{name} {version} for {pin}")
    return lines


def environment_row(versions: dict[str, str], pins: dict[str, str], seconds: float) -> Row:
    """Name the versions, and say so if they are not the image's."""
    assert IMAGE.python is not None
    summary = ", ".join(map(" ".join, versions.items()))
    others = differences(versions, pins, IMAGE.python)
    if others:
        summary += f"; not the image: {', '.join(others)}"
    return Row("environment", summary, passed=1, seconds=seconds)


def make_wheels(python: tuple[int, int]) -> list[Path]:
    """Make the folder of wheels that the image lacks, with Hypothesis for the tests."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    tool = [sys.executable, str(ROOT / "tools/make_wheelhouse.py"), str(WHEELS)]
    version = ".".join(map(str, python))
    options = ["--python", version, "--image", str(IMAGE.pins), "--also", "hypothesis"]
    subprocess.run([*tool, *options], check=True, timeout=1800)
    return sorted(WHEELS.iterdir())


def install_wheels(python: Path) -> None:
    """Install them as on the machine: from the folder alone."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    pip += ["--no-deps", "--no-index"]
    folder = ["--find-links", str(WHEELS), "-r", str(WHEELS / "requirements.txt")]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    subprocess.run([*pip, *folder], check=True, timeout=900, env=environment)


def run_step(step: Step, python: Path, out: Path) -> Row:
    """Run a step; its row counts what its report says, and one failure where there is no report."""
    folder = out / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [word.replace("{out}", str(folder)) for word in step.command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("FAKE_CUDA", None)
    if step.is_fake:
        environment["FAKE_CUDA"] = "1"
    started = time.monotonic()
    print(f"rehearse: {step.name}", flush=True)
    with (out / f"{step.name}.log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                [str(python), *words],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=step.seconds,
                check=False,
            ).returncode
            end = f"ended with {code}"
        except subprocess.TimeoutExpired:
            code = None
            end = f"no end within {step.seconds:.0f} s"
    seconds = time.monotonic() - started
    report = folder / step.report
    counts = Counts(0, 0, 0)
    if report.is_file():
        counts = step.count(report)
    failed = counts.failed
    command = " ".join(step.command).replace("{out}", "OUT")
    summary = f"`{command}`"
    if code != 0 and failed == 0:
        failed = 1
        summary += f": {end}"
    return Row(step.name, summary, counts.passed, failed, counts.skipped, seconds)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| step | what | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = f"{row.passed} | {row.failed} | {row.skipped} | {row.seconds:.0f}"
        lines.append(f"| {row.step} | {row.summary} | {numbers} |")
    return "\n".join(lines) + "\n"


def prepare(rows: list[Row]) -> Path:
    """Make environment and wheels, with a row each, and return the environment's Python."""
    assert IMAGE.python is not None
    started = time.monotonic()
    interpreter = find_interpreter(IMAGE.python)
    make(IMAGE, ENVIRONMENT)
    python = python_of(ENVIRONMENT)
    pins = {}
    for pin in requirements_in(IMAGE.pins):
        (specifier,) = pin.specifier
        pins[pin.name] = specifier.version
    versions = versions_there(python)
    seconds = time.monotonic() - started
    rows.append(environment_row(versions, pins, seconds))
    started = time.monotonic()
    wheels = make_wheels(interpreter.version)
    install_wheels(python)
    seconds = time.monotonic() - started
    num_wheels = len(wheels) - 1  # beside requirements.txt
    summary = f"{num_wheels} wheels, installed without an index"
    rows.append(Row("wheels", summary, passed=1, seconds=seconds))
    tree = tree_files(ROOT)
    rows.append(size_row(tree, wheels))
    return python


def main() -> int:
    names = [step.name for step in steps(0)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results/rehearse", help="%(default)s")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that run tests (%(default)s)"
    )
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        python = prepare(rows)
    except subprocess.SubprocessError as error:
        print(f"rehearse: {error}; see its own message above", file=sys.stderr)
        return 1
    for step in steps(args.workers):
        if step.name in args.only:
            rows.append(run_step(step, python, out))
    text = table(rows)
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    failed = [row.step for row in rows if row.failed]
    verdict = f"FAIL ({', '.join(failed)})" if failed else "PASS"
    print(f"rehearse: {out / 'table.md'}: {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
