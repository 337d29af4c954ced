"""Reward sources of a user's class, `reward=my_module.MySource`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.errors import check_fault, raises_error
from helpers.rewards import request_of
from helpers.tiny_run import tiny_config

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import RewardServerError
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.preflight.report import _rewards
from reinforce_rl.rewards.base import (
    STATUS_OK,
    CompletedRewards,
    RewardRequest,
    Rewards,
    RewardSource,
)
from reinforce_rl.rewards.function_pool import function_faults
from reinforce_rl.rewards.source_class import OwnSource, is_source_class, load_source_class
from reinforce_rl.rewards.sources import connect_to_reward_servers, names_of_scores
from reinforce_rl.runtime.settings import files_of_functions
from reinforce_rl.runtime.trust import authorities


class Lengths:
    """Scores by length; records its arguments and whether it was closed."""

    made: ClassVar[list[tuple[TrainConfig, Any]]] = []
    closed: ClassVar[int] = 0

    def __init__(self, cfg: TrainConfig, tokenizer: Any):
        self.made.append((cfg, tokenizer))

    def infer_rm(self, request: RewardRequest) -> CompletedRewards:
        status = torch.full((len(request.lengths),), STATUS_OK, dtype=torch.int32)
        return CompletedRewards(Rewards(request.lengths.float(), status))

    def close(self) -> None:
        type(self).closed += 1


class Raises(Lengths):
    """Fails at once for a row of one token, and later for other rows."""

    def infer_rm(self, request: RewardRequest) -> CompletedRewards:
        if int(request.lengths.min()) == 1:
            raise KeyError("at once")
        return CompletedRewards(None, OSError("later"))


class Unnamed(Lengths):
    identity: ClassVar[object] = object()


class WithoutClose:
    def infer_rm(self, request: RewardRequest) -> CompletedRewards:
        raise NotImplementedError


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """The dotted name under which `Lengths` can be imported."""
    monkeypatch.setattr(Lengths, "made", [])
    monkeypatch.setattr(Lengths, "closed", 0)
    return f"{__name__}.Lengths"


@pytest.fixture
def connect(mesh: Mesh) -> Callable[[TrainConfig], RewardSource]:
    def connected(cfg: TrainConfig) -> RewardSource:
        tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
        monitor = SilentMonitor(cfg.exp_manager.explicit_log_dir)
        return connect_to_reward_servers(cfg, mesh, tokenizer, monitor)

    return connected


def test_it_is_asked_alone(own_name: str, connect: Callable, tmp_path: Path) -> None:
    cfg = tiny_config(tmp_path, f"reward={own_name}")
    source = connect(cfg)
    assert isinstance(source, OwnSource)
    assert type(source.source) is Lengths
    ((given, tokenizer),) = Lengths.made
    assert given is cfg
    assert tokenizer.eos_token_id is not None
    request = request_of([[4, 5, 6], [4]])
    scores = source.infer_rm(request).result()
    assert scores.values.tolist() == [3.0, 1.0]
    source.close()
    assert Lengths.closed == 1


@pytest.mark.parametrize(
    ("rows", "shown"), [([[4]], "KeyError: 'at once'"), ([[4, 5]], "OSError: later")]
)
def test_what_it_raises_is_raised_where_all_ranks_wait(
    rows: list[list[int]],
    shown: str,
    connect: Callable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = connect(tiny_config(tmp_path, f"reward={__name__}.Raises"))
    future = source.infer_rm(request_of(rows))
    with raises_error("reward.class.raised", "Raises", shown) as caught:
        future.result()
    assert isinstance(caught.value, RewardServerError)
    assert "Traceback" in caplog.text
    source.close()


def test_an_identity_is_json(connect: Callable, tmp_path: Path) -> None:
    with raises_error("reward.class.identity", "Unnamed", "object"):
        connect(tiny_config(tmp_path, f"reward={__name__}.Unnamed"))


@pytest.mark.parametrize("code", ["1 / 0", "def f(:", "raise NameError('x')"])
def test_a_module_that_cannot_be_imported_is_a_fault(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    faults = function_faults(tiny_config(tmp_path, f"reward={name}.Source"))
    check_fault(faults, "reward.class.not_importable", name)
    assert not is_source_class(f"{name}.Source")


def test_a_class_is_told_from_a_function() -> None:
    assert is_source_class(f"{__name__}.Lengths")
    assert not is_source_class("reinforce_rl.rewards.functions.length")
    assert not is_source_class("nowhere.Source")


def test_functions_are_added_to_its_scores(
    own_name: str, connect: Callable, tmp_path: Path
) -> None:
    short = "+reward_function.more_functions.short"
    length = [f"{short}.name=reinforce_rl.rewards.functions.length", f"{short}.weight=10"]
    arguments = [f"{short}.kwargs.target=5", f"{short}.kwargs.tolerance=10"]
    cfg = tiny_config(tmp_path, f"reward={own_name}", *length, *arguments)
    source = connect(cfg)
    request = request_of([[4, 5, 6], [4]])
    scores = source.infer_rm(request).result()
    source.close()
    lengths = scores.by_source["Lengths"]
    assert lengths.tolist() == [3.0, 1.0]
    weighted_sum = lengths + 10 * scores.by_source["short"]
    assert scores.values.tolist() == weighted_sum.tolist()
    assert names_of_scores(cfg) == tuple(scores.by_source) == ("Lengths", "short")
    assert Lengths.closed == 1


def test_a_class_alone_may_name_its_attributes_as_it_likes(own_name: str, tmp_path: Path) -> None:
    assert names_of_scores(tiny_config(tmp_path, f"reward={own_name}")) is None


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("nowhere.Source", "reward.class.not_importable", "nowhere"),
        (f"{__name__}.Nothing", "reward.class.not_importable", "Nothing"),
        (f"{__name__}.WithoutClose", "reward.class.no_source", "close"),
        ("json.dumps", "reward.class.no_source", "infer_rm"),
    ],
)
def test_what_is_no_source_is_refused_before_the_start(
    name: str, key: str, value: str, tmp_path: Path
) -> None:
    with raises_error(key, f"reward is '{name}'", value):
        load_source_class(name)
    cfg = tiny_config(tmp_path, f"reward={name}")
    check_fault(function_faults(cfg), key, name, value)


def test_a_fault_of_the_class_does_not_hide_one_of_a_function(tmp_path: Path) -> None:
    missing = "+reward_function.more_functions.other.name=nowhere_either.f"
    faults = function_faults(tiny_config(tmp_path, "reward=nowhere.Source", missing))
    check_fault(faults, "reward.class.not_importable", "nowhere")
    check_fault(faults, "reward_function.module.missing", "nowhere_either")


@pytest.mark.parametrize(
    "name", ["model", "my-module.Source", "a..B", ".Source", "Source.", "1a.B"]
)
def test_another_word_is_refused(name: str, tmp_path: Path) -> None:
    with raises_error("config.reward.unknown", "reward", name, "server, function"):
        tiny_config(tmp_path, f"reward='{name}'")


def test_reading_a_configuration_does_not_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = tiny_config(tmp_path, "reward=planted.Source")
    assert cfg.reward_class == "planted.Source"
    assert cfg.reward_servers == {}
    assert cfg.reward_functions == {}


def test_a_folder_has_no_authority_to_name_it(own_name: str, tmp_path: Path) -> None:
    cfg = tiny_config(tmp_path, f"reward={own_name}")
    (authority,) = authorities(cfg)
    assert authority.key == "reward"
    assert authority.value == own_name
    assert list(authorities(cfg, rewards=False)) == []


def test_the_plan_and_the_history_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_source.py").write_text("class Source: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = tiny_config(tmp_path, "reward=my_source.Source")
    assert _rewards(cfg) == "class my_source.Source"
    digest = files_of_functions(cfg)["my_source.Source"]
    assert digest is not None
    (tmp_path / "my_source.py").write_text("class Source: pass\n")
    assert files_of_functions(cfg)["my_source.Source"] != digest
