"""Environments for other projects' code: complete or absent, made once, apart."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.environments import engine_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "make_environment.py"
SHELL = ROOT / "tools" / "make_engine_env.sh"
spec = importlib.util.spec_from_file_location("make_environment", TOOL)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool  # for its dataclass
spec.loader.exec_module(tool)

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL and vLLM need Python 3.11")


def write_wheel(folder: Path, name: str, release: str) -> None:
    files = {
        f"{name}.py": f"RELEASE = {release!r}\n",
        f"{name}-{release}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
        ),
        f"{name}-{release}.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        for path, text in files.items()
    }
    record = "".join(
        f"{path},sha256={digest.decode().rstrip('=')},\n" for path, digest in digests.items()
    )
    with zipfile.ZipFile(folder / f"{name}-{release}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{name}-{release}.dist-info/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tool.Environment]:
    """An environment with one small wheel from a folder."""
    write_wheel(tmp_path, "small_thing", "1.0")
    write_wheel(tmp_path, "small_thing", "2.0")
    pins = tmp_path / "pins.txt"
    pins.write_text("small_thing==1.0\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_ARGS", f"--no-index --find-links {tmp_path}")
    yield tool.Environment("a small thing", pins, "import small_thing, filelock")
    assert not list(tmp_path.glob("*.partial.*"))


def release_in(folder: Path) -> str:
    code = "import small_thing; print(small_thing.RELEASE)"
    command = [tool.python_of(folder), "-I", "-c", code]
    return subprocess.check_output(command, text=True).strip()


@pytest.mark.more
def test_made_once_and_again_when_a_pin_changes(wanted, tmp_path, monkeypatch):
    folder = tmp_path / "made"
    tool.make(wanted, folder)
    assert release_in(folder) == "1.0"
    with monkeypatch.context() as offline:
        offline.setenv("PIP_ARGS", "--no-index")
        tool.make(wanted, folder)  # pip would find nothing
        wanted.pins.write_text("small_thing==2.0\n")
        with pytest.raises(SystemExit, match="installing a small thing failed"):
            tool.make(wanted, folder)
        assert release_in(folder) == "1.0", "what was there stays until the new one is complete"
    tool.make(wanted, folder)
    assert release_in(folder) == "2.0"


@pytest.mark.more
def test_a_complete_one_that_came_up_meanwhile_stays(wanted, tmp_path, monkeypatch):
    folder = tmp_path / "made"
    build = tool.build

    def build_while_another_is_faster(wanted: tool.Environment, partial: Path) -> None:
        monkeypatch.setattr(tool, "build", build)
        tool.make(wanted, folder)
        inodes.append(folder.stat().st_ino)
        build(wanted, partial)

    inodes: list[int] = []
    monkeypatch.setattr(tool, "build", build_while_another_is_faster)
    tool.make(wanted, folder)
    assert inodes == [folder.stat().st_ino]


def test_the_project_is_borrowed_from_and_cannot_be_imported(wanted, tmp_path):
    tool.make(wanted, tmp_path / "made")
    # The editable install has `reinforce_rl/conf` in its site-packages, a package without modules.
    code = (
        "import filelock, importlib.util as u; print(filelock.__file__, "
        "u.find_spec('reinforce_rl.generation'))"
    )
    command = [tool.python_of(tmp_path / "made"), "-I", "-c", code]
    said = subprocess.check_output(command, text=True).split()
    assert not said[0].startswith(str(tmp_path))
    assert said[1] == "None"


def test_an_environment_that_does_not_work_is_not_left(wanted, tmp_path):
    broken = dataclasses.replace(wanted, check="import small_thing, no_such_thing")
    with pytest.raises(SystemExit) as exited:
        tool.make(broken, tmp_path / "made")
    (line,) = str(exited.value).splitlines()
    assert "importing a small thing failed (1)" in line
    assert line.endswith("ModuleNotFoundError: No module named 'no_such_thing'")
    assert not (tmp_path / "made").exists()


def test_another_torch_is_refused_before_anything_is_installed(wanted, tmp_path):
    with pytest.raises(
        SystemExit,
        match=rf"works with 1\.0 only, but .* has {re.escape(version('torch'))}: install",
    ):
        tool.make(dataclasses.replace(wanted, torch="1.0"), tmp_path / "made")


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


class TestInterpreters:
    """Interpreters by the words that start them."""

    @pytest.fixture(autouse=True)
    def no_others(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
        monkeypatch.delenv("IMAGE_PYTHON", raising=False)
        tool.find_interpreter.cache_clear()
        yield
        tool.find_interpreter.cache_clear()

    def test_one_that_does_not_start_is_passed_over(self, tmp_path):
        script(
            tmp_path / "first/python3.12",
            "echo 'pyenv: python3.12: command not found' >&2; exit 127",
        )
        works = script(tmp_path / "second/python3.12", "echo 3 12")
        assert tool.find_interpreter((3, 12)) == tool.Interpreter(works, (3, 12))

    @pytest.mark.parametrize("end", ["exit 1", "kill -9 $$", "echo no version", "echo 3 13"])
    def test_one_of_pyenv_is_found_behind_others(self, tmp_path, end):
        script(tmp_path / "first/python3.12", end)
        script(tmp_path / "second/python3", "echo 3 10")
        works = script(tmp_path / "home/.pyenv/versions/3.12.1/bin/python", "echo 3 12")
        assert tool.find_interpreter((3, 12)) == tool.Interpreter(works, (3, 12))

    def test_the_one_that_is_named_comes_first(self, tmp_path, monkeypatch):
        script(tmp_path / "first/python3.12", "echo 3 12")
        named = script(tmp_path / "named", "echo 3 12")
        monkeypatch.setenv("IMAGE_PYTHON", named)
        assert tool.find_interpreter((3, 12)).path == named

    def test_without_the_right_one_the_nearest_is_taken_with_the_nearest_versions(self, tmp_path):
        script(tmp_path / "first/python3.12", "exit 1")
        script(tmp_path / "first/python3.10", "echo 3 10")
        nearest = script(tmp_path / "second/python3.11", "echo 3 11")
        assert tool.find_interpreter((3, 12)) == tool.Interpreter(nearest, (3, 11))
        wanted = tool.ENVIRONMENTS["image"]
        requirements = tool.requirements_for(wanted, tmp_path).read_text()
        assert "numpy<=2.5.2" in requirements
        assert "==" not in requirements

    def test_without_any_the_error_names_the_variable(self, tmp_path):
        script(tmp_path / "first/python3", "echo 2 7")
        with pytest.raises(SystemExit, match="IMAGE_PYTHON"):
            tool.find_interpreter((3, 12))

    def test_the_environment_is_made_by_it(self, wanted, tmp_path, monkeypatch):
        monkeypatch.setenv("IMAGE_PYTHON", sys.executable)
        version = sys.version_info[:2]
        image = dataclasses.replace(
            wanted, check="import small_thing", borrows=False, python=version
        )
        tool.make(image, tmp_path / "made")
        assert release_in(tmp_path / "made") == "1.0"
        assert tool.is_complete(image, tmp_path / "made")


def shell(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    kept |= {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, **environment}
    command = [SHELL, *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, timeout=60, env=kept)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_script_names_the_command_and_why_it_failed(kind, tmp_path):
    done = shell(tmp_path / "made", kind, PIP_ARGS="--no-index")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert not done.stdout
    assert f"installing vLLM for {kind.upper()}s failed (1): " in line
    assert " --no-index -r " in line
    assert "ERROR: No matching distribution found for " in line
    assert ("--no-deps" in line) == (kind == "cpu")
    assert not list(tmp_path.iterdir())


def test_the_script_by_a_python_without_torch(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    done = shell(tmp_path / "made", PYTHON=str(tmp_path / "bare/bin/python"))
    assert done.returncode == 1
    assert f"from {tmp_path}/bare/bin/python, which has none" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("arguments", [("made", "tpu"), ("made", "cpu", "more")])
def test_the_script_says_what_it_expects(arguments):
    done = shell(*arguments)
    assert done.returncode == 2
    assert f"'{' '.join(arguments)}', expected [FOLDER] [cpu|gpu]" in done.stderr


def test_the_script_without_a_python(tmp_path):
    done = shell(tmp_path / "made", PYTHON=str(tmp_path / "python"))
    assert done.returncode == 1
    assert f"no Python at {tmp_path}/python; run make install" in done.stderr


def requirements(name: str) -> list[Requirement]:
    lines = tool.ENVIRONMENTS[name].pins.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", list(tool.ENVIRONMENTS))
def test_pins_are_exact_and_each_package_has_one(name):
    pins = requirements(name)
    names = [canonicalize_name(pin.name) for pin in pins]
    assert pins
    assert len(set(names)) == len(names)
    for pin in pins:
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier))
    if tool.ENVIRONMENTS[name].borrows:
        assert not {"torch", "triton", "torchvision", "torchaudio", "numba"} & set(names)


def test_both_engines_are_the_same_release():
    releases = {
        str(pin.specifier)
        for name in ("engine-cpu", "engine-gpu")
        for pin in requirements(name)
        if "vllm" in pin.name
    }
    assert len(releases) == 1


ASK = """
import json, sys
from importlib.metadata import packages_distributions, requires, version
of = packages_distributions()
imported = {name for module in list(sys.modules) for name in of.get(module.partition(".")[0], [])}
print(json.dumps({name: [version(name), requires(name) or [], name in imported] for name in NAMES}))
"""


@pytest.mark.engine
@pytest.mark.timeout(900)  # the first call installs
def test_each_pin_is_imported_or_wanted_and_goes_with_the_others():
    pins = [canonicalize_name(pin.name) for pin in requirements("engine-cpu")]
    wanted = tool.ENVIRONMENTS["engine-cpu"]
    code = f"{wanted.check}\nNAMES = {pins}\n{ASK}"
    command = [engine_environment(), "-I", "-W", "ignore", "-c", code]
    said = subprocess.check_output(command, text=True, timeout=600)
    releases: dict[str, str] = {"torch": f"{wanted.torch}+cpu"}
    used: set[str] = set()
    lines: list[str] = []
    for name, (release, requires, imported) in json.loads(said.splitlines()[-1]).items():
        releases[canonicalize_name(name)] = release
        lines += requires
        if imported:
            used.add(canonicalize_name(name))
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name in releases and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            assert requirement.specifier.contains(releases[name]), requirement
            used.add(name)
    assert set(pins) <= used
