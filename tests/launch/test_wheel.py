"""The wheel in an environment without the repository, as after `pip install`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from helpers.errors import printed_keys
from helpers.tiny_run import tiny_overrides
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
Run = Callable[..., subprocess.CompletedProcess[str]]


def brought() -> set[str]:
    """Return files and folders that `pip install reinforce-rl[demo]` would also install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [
        Requirement(text) for text in [*project["dependencies"], *extras["server"], *extras["demo"]]
    ]
    seen: set[tuple[str, str]] = set()
    names: set[str] = set()
    while todo:
        wanted = todo.pop()
        for extra in ("", *wanted.extras):
            name = (canonicalize_name(wanted.name), extra)
            if name in seen or name[0] == "reinforce-rl":
                continue
            seen.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                distribution = metadata.distribution(name[0])
                names |= {
                    file.parts[0]
                    for file in distribution.files or ()
                    if file.parts[0] not in ("..", "__pycache__")
                }
                needed = map(Requirement, distribution.requires or [])
                todo += [
                    other
                    for other in needed
                    if other.marker is None or other.marker.evaluate({"extra": extra})
                ]
    assert {"torch", "pytriton", "gguf"} <= names
    assert not {"pytest", "peft", "wandb"} & names
    return names


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in an environment that borrows its dependencies; return the bin folder."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, timeout=120, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    purelib = sysconfig.get_path(
        "purelib", vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    )
    for name in brought():
        (Path(purelib) / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    return python.parent


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run a command of the environment in an empty folder."""
    names = ("PYTHONPATH", "WORLD_SIZE", "RANK")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {
        "PATH": f"{installed}:{environment['PATH']}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("XDG_CACHE_HOME", None)
    (tmp_path / "here").mkdir()

    def run(*words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=tmp_path / "here",
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    return run


def test_the_wheel_brings_the_command_and_what_a_run_needs(
    run: Run, installed: Path, tmp_path: Path
) -> None:
    assert (
        run("reinforce-rl", "--version").stdout
        == run("python", "-m", "reinforce_rl", "--version").stdout
    )
    assert "train-rm" in run("reinforce-rl", "--help").stdout
    code = (
        "import json, reinforce_rl\n"
        "from reinforce_rl.config.compose import CONF_FOLDER\n"
        "from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER\n"
        "from reinforce_rl.utils.paths import shipped\n"
        "demo = sorted(path.name for path in shipped('demo', 'examples/demo').rglob('*.*'))\n"
        "print(json.dumps([reinforce_rl.__file__, str(CONF_FOLDER), str(DEFAULT_FOLDER), demo]))"
    )
    package, conf, model_folder, demo = json.loads(run("python", "-c", code).stdout)
    assert package.startswith(str(installed.parent))
    assert conf.startswith(str(installed.parent))
    assert model_folder == str(tmp_path / ".cache/reinforce_rl/models/SmolLM2-135M-Instruct")
    demo_files = (ROOT / "examples/demo").rglob("*.*")
    assert {path.name for path in demo_files if path.suffix != ".pyc"} <= set(demo)
    assert (Path(package).parent / "py.typed").is_file()


def test_a_users_yaml_and_reward_on_two_ranks(run: Run, tmp_path: Path) -> None:
    here = tmp_path / "here"
    overrides = dict(word.split("=", 1) for word in tiny_overrides(tmp_path))
    (here / "mine").mkdir()
    (here / "mine" / "short.yaml").write_text(
        "defaults: [train_reinforce_actor]\n"
        "trainer: {devices: 2, reinforce: {max_steps: 2}}\n"
        "reward: function\n"
        "reward_function: {name: mine_too.vowels, sample_timeout_seconds: 60}\n"
    )
    (here / "mine_too.py").write_text(
        "def vowels(prompt, response, record):\n"
        "    return float(sum(letter in 'aeiou' for letter in response))\n"
    )
    given = [
        f"{key}={value}"
        for key, value in overrides.items()
        if not key.startswith("exp_manager.expl")
    ]
    words = [
        "--config-dir",
        "mine",
        "--config-name",
        "short",
        *given,
        "exp_manager.explicit_log_dir=out",
    ]
    plan = run("reinforce-rl", "preflight", *words)
    assert plan.returncode == 0, plan.stdout + plan.stderr
    assert "2 ranks" in plan.stdout, plan.stdout + plan.stderr
    assert not (here / "out").exists()
    done = run("reinforce-rl", "train", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (here / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    again = run("reinforce-rl", "train", *words)
    assert again.returncode == 0, again.stderr[-2000:]


def test_a_deep_preflight_says_that_it_needs_a_clone(
    run: Run, installed: Path, tmp_path: Path
) -> None:
    """It needs the fake GPUs, a test helper that the wheel does not contain."""
    done = run("reinforce-rl", "preflight", "--deep", *tiny_overrides(tmp_path))
    assert done.returncode == 1
    assert printed_keys(done.stderr) == ["preflight.deep.needs_clone"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (package,) = installed.parent.glob("lib/python*/site-packages/reinforce_rl")
    assert not list(package.rglob("*fake_cuda*"))


def test_a_slurm_job_is_planned(run: Run, installed: Path, tmp_path: Path) -> None:
    # Hide a Slurm of this machine from PATH.
    words = [
        "/usr/bin/env",
        f"PATH={installed}",
        "reinforce-rl",
        "submit",
        "--dry-run",
        "--time",
        "00:10:00",
        *tiny_overrides(tmp_path),
        "--",
    ]
    done = run(*words, "reward_function.name=reinforce_rl.rewards.functions.vader")
    repository = re.search(r"repository +(\S+)", done.stdout)
    assert repository is not None, done.stdout + done.stderr
    folder = Path(repository[1])
    assert (folder / "reinforce_rl" / "slurm" / "train_hetjob.sbatch").is_file()
    assert folder.is_relative_to(installed.parent)


def test_server_and_actor_of_the_wheel_on_one_machine(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    words = ["reinforce-rl", "launch", "--run-dir", "out"]
    words += ["--server-args", "reward_function.name=reinforce_rl.rewards.functions.length"]
    words += ["+reward_function.kwargs.target=2", "+reward_function.kwargs.tolerance=2"]
    words += ["--actor-args", *tiny_overrides(tmp_path), "trainer.reinforce.max_steps=1"]
    done = run(*words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "reward server: ready" in done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    shutil.rmtree(tmp_path / "run")
