"""A run's folder provides values, and never anything that gives it authority."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import raises_error

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.compose import compose
from reinforce_rl.config.load import read_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.runtime.trust import (
    MOST_RANKS,
    MOST_WORKERS,
    authorities,
    remove_from_import_path,
    require_trust,
    without_custom_generator,
)
from reinforce_rl.utils.process import PACKAGE_PARENT

FUNCTION = "reward_function.name"


def config(*overrides: str) -> TrainConfig:
    return read_config(compose("train_reinforce_actor", overrides))[0]


def keys(*overrides: str, **parts: bool) -> list[str]:
    return [authority.key for authority in authorities(config(*overrides), **parts)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward=function", f"{FUNCTION}=cProfile.run"], [FUNCTION]),
        # A shipped function too: its arguments may name an address, a file and a secret.
        (
            [
                "reward=function",
                f"{FUNCTION}=reinforce_rl.rewards.judge.llm_judge",
                "+reward_function.kwargs.api_key_variable=SECRET",
                "reward_function.environment=[SECRET]",
            ],
            [FUNCTION, "reward_function.kwargs", "reward_function.environment"],
        ),
        (
            ["reward=server", "+reward_function.more_functions.b.name=a.b"],
            ["reward_function.more_functions.b.name", "remote_rm.reward_model.ip"],
        ),
        (
            [
                "remote_rm.reward_model.token_file=/secret/token",
                "remote_rm.reward_model.replicas=['evil:1']",
            ],
            [f"remote_rm.reward_model.{name}" for name in ("ip", "replicas", "token_file")],
        ),
        (
            ["+remote_rm.more_reward_models.second.ip=evil"],
            ["remote_rm.reward_model.ip", "remote_rm.more_reward_models.second.ip"],
        ),
        (
            ["reward=function", f"{FUNCTION}=a.b", "generation=evil.Generator"],
            [FUNCTION, "generation"],
        ),
        (
            ["reward=function", f"{FUNCTION}=a.b", "generation=vllm", "engine.python=/tmp/python"],
            [FUNCTION, "engine.python"],
        ),
        # A port that the folder chose, on any host.
        (
            ["remote_rm.reward_model.port=6000"],
            ["remote_rm.reward_model.ip", "remote_rm.reward_model.port"],
        ),
        # Unused values: an engine's Python without an engine, a server where a function scores.
        (
            [
                "reward=function",
                f"{FUNCTION}=a.b",
                "engine.python=/tmp/python",
                "remote_rm.reward_model.ip=evil",
            ],
            [FUNCTION],
        ),
    ],
)
def test_what_is_authority(overrides, expected):
    assert keys(*overrides) == expected


def test_only_what_is_used_counts():
    overrides = ["reward=function", f"{FUNCTION}=a.b", "generation=evil.Generator"]
    assert keys(*overrides, generation=False) == [FUNCTION]
    assert keys(*overrides, rewards=False) == ["generation"]


def test_a_data_set_of_the_hub_is_asked_for_with_a_token():
    prefix = "model.data.data_prefix"
    data = [f"{prefix}.train=[0.5,hf:evil/a,0.5,b.jsonl]", f"{prefix}.validation={{x:[hf:evil/c]}}"]
    assert f"{prefix}.train" not in keys(*data)
    assert [key for key in keys(*data, data=True) if key.startswith(prefix)] == [
        f"{prefix}.train",
        f"{prefix}.validation",
    ]


@pytest.mark.parametrize("value", ["./hf:evil/a", "' hf:evil/a'", "HF:evil/a", "/tmp/hf:evil/a"])
def test_a_path_that_looks_like_a_data_set_of_the_hub_is_no_authority(value: str) -> None:
    """`tests/data/test_readers.py` shows that it is read as a path."""
    prefix = "model.data.data_prefix"
    overrides = [f"{prefix}.train={value}", f"{prefix}.test=[{value}]"]
    assert keys(*overrides, rewards=False, data=True) == []


def test_a_crowd_of_ranks_is_authority_and_a_few_are_not():
    few = ["trainer.devices=8", "trainer.num_nodes=1"]
    assert keys(*few, rewards=False, ranks=True) == []
    both = ["trainer.devices=5000", "trainer.num_nodes=3"]
    assert keys(*both, rewards=False, ranks=True) == ["trainer.devices", "trainer.num_nodes"]
    nodes = ["trainer.devices=1", f"trainer.num_nodes={MOST_RANKS + 1}"]
    assert keys(*nodes, rewards=False, ranks=True) == ["trainer.num_nodes"]
    assert keys(*both, rewards=False) == [], "where one rank works"


def test_a_crowd_of_workers_is_authority_where_functions_are_called():
    key = "reward_function.num_workers"
    function = ["reward=function", f"{FUNCTION}=a.b"]
    assert keys(*function, f"{key}={MOST_WORKERS}") == [FUNCTION]
    assert keys(*function, f"{key}={MOST_WORKERS + 1}") == [FUNCTION, key]
    assert key in keys("+reward_function.more_functions.b.name=a.b", f"{key}=100000")
    assert key not in keys(f"{key}=100000"), "a server scores"


class TestUse:
    @pytest.fixture(autouse=True)
    def _own_path(self, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])

    def test_what_the_folder_alone_names_is_refused_all_in_one(self, tmp_path):
        cfg = config(
            "reward=function", f"{FUNCTION}=evil.f", "+remote_rm.more_reward_models.b.ip=evil"
        )
        before = [*sys.path]
        with pytest.raises(ConfigError) as error:
            require_trust(cfg, ["model.seed=3"], tmp_path, trust=False)
        assert error.value.keys == ["trust.setting.only_of_folder"] * 2
        settings = [fault.split(" ")[0] for fault in error.value.faults]
        assert settings == [FUNCTION, "remote_rm.more_reward_models.b.ip"]
        for fault in error.value.faults:
            assert str(tmp_path) in fault
            assert "--trust" in fault
        assert "evil.f" in error.value.faults[0]
        assert sys.path == before

    def test_each_factor_of_a_crowd_is_the_readers_or_refused(self, tmp_path):
        """If the reader gave one factor, the other one would come from the folder."""
        cfg = config("trainer.devices=5000", "trainer.num_nodes=1")
        nodes = ["trainer.num_nodes=1"]
        named = ("trainer.devices", "'5000'", "5000 ranks", "trainer.devices=VALUE")
        with raises_error("trust.setting.only_of_folder", *named):
            require_trust(cfg, nodes, tmp_path, trust=False, rewards=False, ranks=True)
        both = [*nodes, "trainer.devices=5000"]
        require_trust(cfg, both, tmp_path, trust=False, rewards=False, ranks=True)
        listed: list[str] = []
        options = {"rewards": False, "ranks": True, "say": listed.append}
        require_trust(cfg, [], tmp_path, trust=True, **options)
        assert len(listed) == 1
        assert "trainer.devices is '5000'" in listed[0]

    @pytest.mark.parametrize("prefix", ["", "+", "++"])
    def test_what_the_reader_names_is_theirs(self, tmp_path, prefix):
        cfg = config("reward=function", f"{FUNCTION}=mine.f", "+reward_function.kwargs.target=3")
        given = [f"{prefix}{FUNCTION}=mine.f", "~reward_function.kwargs"]
        require_trust(cfg, given, tmp_path, trust=False)
        below = [given[0], "reward_function.kwargs.target=3"]
        named = ("reward_function.kwargs ", "target")
        with raises_error("trust.setting.only_of_folder", *named):
            require_trust(cfg, below, tmp_path, trust=False)

    @pytest.mark.parametrize(
        ("override", "key"),
        [
            ("+reward_function.kwargs={target: 5}", "reward_function.kwargs"),
            ("reward_function={name: my.f}", FUNCTION),
            ("remote_rm={reward_model: {ip: mine}}", "remote_rm.more_reward_models.b.ip"),
        ],
    )
    def test_a_mapping_vouches_for_nothing_below_it(self, tmp_path, override, key):
        """Hydra merges it into the folder's mapping, whose other entries stay."""
        folder = ["reward=function", f"{FUNCTION}=my.f", "+reward_function.kwargs.url=http://evil"]
        folder.append("+remote_rm.more_reward_models.b.ip=evil")
        cfg = config(*folder)
        with pytest.raises(ConfigError) as error:
            require_trust(cfg, [override], tmp_path, trust=False)
        assert key in {fault.partition(" ")[0] for fault in error.value.faults}

    def test_trust_lists_all_of_it_first_and_finds_copied_functions(self, tmp_path):
        said: list[str] = []
        cfg = config(
            "reward=function", f"{FUNCTION}=evil.f", "generation=vllm", "engine.python=/tmp/python"
        )
        require_trust(cfg, [], tmp_path, trust=True, say=said.append)
        assert ["evil.f" in said[0], "/tmp/python" in said[1], len(said)] == [True, True, 2]
        assert str(tmp_path) in sys.path


def test_a_class_that_generates_is_not_even_looked_for():
    expected = {"generation": "native", "reward": "x"}
    assert without_custom_generator({"generation": "evil.sub.Class", "reward": "x"}) == expected
    assert without_custom_generator({"generation": "vllm"}) == {"generation": "vllm"}
    assert without_custom_generator({}) == {}


PLUGIN = "raise SystemExit('a plugin of the folder ran')"


@pytest.mark.parametrize("start", [".", "inside"])
def test_a_folder_in_which_the_reader_starts_is_not_on_the_import_path(
    start, tmp_path, monkeypatch
):
    plugin = tmp_path / "hydra_plugins" / "evil"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(
        sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "inside"), str(tmp_path.parent)]
    )
    monkeypatch.chdir(tmp_path / start)
    sys.path.insert(0, "")
    remove_from_import_path(tmp_path)
    assert str(tmp_path) not in sys.path
    assert str(tmp_path / "inside") not in sys.path
    assert "" not in sys.path
    assert str(tmp_path.parent) in sys.path


def test_hydra_finds_no_plugins_there(tmp_path):
    plugin = tmp_path / "hydra_plugins" / "evil"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    code = (
        "import os, sys; sys.path.append(os.getcwd())\n"
        "from reinforce_rl.runtime.trust import remove_from_import_path\n"
        "{keeps}\n"
        "from reinforce_rl.config.compose import compose_stored\n"
        "print(compose_stored({{'model': {{'seed': 1}}}}, []))\n"
    )

    def run(keeps: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code.format(keeps=keeps)]
        environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, timeout=120, check=False, **options)

    assert "a plugin of the folder ran" in run("pass").stderr, "so that the test can fail"
    kept = run("remove_from_import_path('.')")
    assert (kept.returncode, kept.stdout.strip()) == (0, "{'model': {'seed': 1}}"), kept.stderr


def test_an_environment_within_the_folder_stays_on_the_path(tmp_path, monkeypatch):
    """Such as `explicit_log_dir=.` in a project with a .venv."""
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(packages), str(tmp_path / "run")])
    remove_from_import_path(tmp_path)
    assert sys.path == [str(packages)]


def test_the_folder_of_the_tests_is_still_found():
    """`remove_from_import_path` gets folders of runs, below the reader's current folder."""
    before = [*sys.path]
    remove_from_import_path(Path(os.getcwd()) / "no" / "such" / "run")
    assert sys.path == before
