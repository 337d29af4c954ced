"""The variables of a job: all faults in one message, defaults as the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import VARIABLES, Settings, read_settings, split_arguments

REPOSITORY = Path("/repo")


def faults_of(argv: list[str], **environment: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_settings(argv, environment, REPOSITORY)
    return caught.value.faults


def test_defaults_are_those_of_the_table() -> None:
    found = read_settings(["a=1", "--", "b=2"], {names.RUN_DIR: "/shared/run"}, REPOSITORY)
    assert found == Settings(Path("/shared/run"), REPOSITORY, actor_args=("a=1",), server_args=("b=2",))


def test_all_variables_are_read() -> None:
    given = {
        names.RUN_DIR: "/shared/run",
        names.PYTHON: "/opt/python",
        names.LAUNCHER: "torchrun",
        names.ACTOR_DEVICES: "8",
        names.SERVER_DEVICES: "4",
        names.SERVERS: "2",
        names.READY_SECONDS: "30.5",
        names.GRACE_SECONDS: "7",
        names.MAX_RESTARTS: "0",
        names.RESTART_AFTER_CRASH: "true",
        names.MPI: "pmix",
        names.CONTAINER_IMAGE: "a.sqsh",
        names.SERVER_CONTAINER_IMAGE: "b.sqsh",
        names.CONTAINER_MOUNTS: "/data:/data, /models:/models",
        names.SRUN_ARGS: "--cpu-bind=none --gres='gpu:a b'",
        names.SETUP: "module load cuda",
    }
    assert {*given, names.REPOSITORY} == {variable.name for variable in VARIABLES}
    assert read_settings([], given, REPOSITORY) == Settings(
        Path("/shared/run"),
        REPOSITORY,
        "/opt/python",
        "torchrun",
        8,
        4,
        2,
        30.5,
        7.0,
        0,
        True,
        "pmix",
        "a.sqsh",
        "b.sqsh",
        ("/data:/data", "/models:/models"),
        ("--cpu-bind=none", "--gres=gpu:a b"),
        "module load cuda",
    )


def test_all_faults_are_told_at_once() -> None:
    found = faults_of(
        [
            "exp_manager.explicit_log_dir=/elsewhere",
            "nonsense",
            "remote_rm.reward_model.port=1",
            "--",
            "inference.port=2",
        ],
        REINFORCE_RUN_DIR="relative",
        REINFORCE_LAUNCHER="mpirun",
        REINFORCE_SERVERS="0",
        REINFORCE_ACTOR_DEVICES="many",
        REINFORCE_READY_SECONDS="-1",
        REINFORCE_GRACE_SECONDS="nan",
        REINFORCE_MAX_RESTARTS="1.5",
        REINFORCE_RESTART_AFTER_CRASH="yes",
        REINFORCE_SRUN_ARGS="'open",
        REINFORCE_CONTAINER_MOUNTS="data",
    )
    starts = [
        "REINFORCE_RUN_DIR is 'relative'; expected an absolute path",
        "exp_manager.explicit_log_dir is /elsewhere",
        "REINFORCE_LAUNCHER is 'mpirun'; expected srun or torchrun",
        "REINFORCE_ACTOR_DEVICES is 'many'; expected a whole number from 1",
        "REINFORCE_SERVERS is '0'; expected a whole number from 1",
        "REINFORCE_READY_SECONDS is '-1'",
        "REINFORCE_GRACE_SECONDS is 'nan'",
        "REINFORCE_MAX_RESTARTS is '1.5'; expected a whole number from 0",
        "REINFORCE_RESTART_AFTER_CRASH is 'yes'; expected false or true",
        "REINFORCE_CONTAINER_MOUNTS has 'data'",
        "REINFORCE_CONTAINER_MOUNTS is set, but neither",
        "REINFORCE_SRUN_ARGS is ''open'",
        "'nonsense' among the actor's arguments",
        "remote_rm.reward_model.port is given among the actor's",
        "inference.port is given among the server's",
    ]
    for fault, start in zip(found, starts, strict=True):
        assert fault.startswith(start), (fault, start)


def test_run_dir_is_needed_and_may_be_said_twice() -> None:
    assert faults_of([]) == ["REINFORCE_RUN_DIR is not set; expected the run's folder, which all nodes share"]
    args = ["exp_manager.explicit_log_dir=/run/"]
    assert read_settings(args, {names.RUN_DIR: "/run"}, REPOSITORY).run_dir == Path("/run")


def test_arguments_are_split_at_the_first_separator() -> None:
    assert split_arguments(["a", "--", "b", "c"]) == (("a",), ("b", "c"))
    assert split_arguments(["a"]) == (("a",), ())
    assert split_arguments(["--", "b"]) == ((), ("b",))


def test_interpreter(tmp_path: Path) -> None:
    settings = Settings(Path("/run"), tmp_path)
    assert settings.interpreter("") == "python3"
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert settings.interpreter("") == str(own)
    assert settings.interpreter("image") == "python3"  # the host's environment is of no use in a container
    assert Settings(Path("/run"), tmp_path, "/opt/python").interpreter("image") == "/opt/python"


def test_the_page_has_a_row_for_every_variable():
    page = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")
    for variable in VARIABLES:
        assert f"| `{variable.name}` | {variable.default} | {variable.meaning} |" in page
