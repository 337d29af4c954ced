"""`preflight=deep` from the command line's keys to the report, with a fake GPU in a process."""

from __future__ import annotations

import io
import json

import pytest
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.tiny_run import compose, three_letters, write_prompts
from rich.console import Console

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.preflight import deep, fake_gpu
from reinforce_rl.preflight.run import preflight


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=64
    )
    write_prompts(folder / "train.jsonl", three_letters(8))
    return [
        f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
        f"model.data.data_prefix.train={folder / 'train.jsonl'}",
        "model.encoder_seq_length=64",
        "model.reinforce.length_params.max_length=16",
        "model.optim.distributed=true",
        "reward=function",
        "reward_function.name=reinforce_rl.rewards.functions.gsm8k",
        "trainer.devices=4",
        "trainer.precision=bf16",
        "preflight=deep",
    ]


def printed(*overrides: str) -> str:
    out = io.StringIO()
    preflight(compose(*overrides), Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.more
def test_a_step_has_a_lower_bound_and_better_ones_are_tried(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(deep, "MOST_TRIED", 1)
    run = f"exp_manager.explicit_log_dir={tmp_path}"
    text = printed(*overrides, run, "preflight_response_tokens=8")
    for words in (
        "A step on 4 x H100 SXM 80 GB: lower bound by FLOPs and bytes",
        "prompts of 3 tokens and responses of 8 on average",
        "% of the bound, limited by ",
        "No fault was found",
    ):
        assert words in text
    assert "predict" not in text
    report = json.loads((tmp_path / "preflight.json").read_text())
    names = ["generation", "log-probs", "reference log-probs", "training", "optimizer"]
    assert [phase["name"] for phase in report["phases"]] == names
    bounds = [phase["lower_bound_seconds"] for phase in report["phases"]]
    assert report["lower_bound_seconds"] == pytest.approx(sum(bounds))
    expected = [max(phase["parts"].values()) for phase in report["phases"]]
    assert bounds == expected
    assert report["tokens"] == 8 * 4 * (3 + 8)
    assert set(names) < set(report["peaks"])
    # All of the tiny model lies in the cache. Its reference comes from the host.
    bandwidths = {phase["parts"]["memory bandwidth"] for phase in report["phases"]}
    assert bandwidths == {0.0}
    assert report["phases"][2]["parts"]["PCIe"] > 0
    for phase in report["phases"][:4]:
        assert phase["parts"]["matrix products"] > 0
    training = report["phases"][3]
    kinds = {
        (collective["kind"], collective["group"], collective["ranks"], collective["nodes"])
        for collective in training["collectives"]
    }
    assert ("reduce_scatter", "data", 4, 1) in kinds
    for change in report["changes"]:
        assert change["fits"]
        assert change["lower_bound_seconds"] < deep.BETTER * report["lower_bound_seconds"]


@pytest.mark.slow
def test_a_gpu_too_small_and_a_machine_that_is_unknown_are_faults(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(deep, "MOST_TRIED", 0)
    machine = tmp_path / "small.yaml"
    machine.write_text("base: h100\nname: tiny GPU\nmemory: 3.00001e9\n")
    with raises_error("preflight.memory.too_little", "needs 0.0 GB", "tiny GPU", "has only 0.0 GB"):
        printed(
            *overrides, f"exp_manager.explicit_log_dir={tmp_path}", f"preflight_machine={machine}"
        )
    with raises_error("preflight.machine.unknown", "preflight_machine is 'h1000'"):
        printed(*overrides, f"exp_manager.explicit_log_dir={tmp_path}", "preflight_machine=h1000")


def test_a_rank_that_fails_is_a_fault(overrides, tmp_path, monkeypatch):
    def fails(self, job):
        raise deep.DeepFault("rank 3 fails in training", key="preflight.deep.rank_fails")

    monkeypatch.setattr(deep.Worker, "measure", fails)
    with raises_error("preflight.deep.rank_fails", "rank 3"):
        printed(*overrides, f"exp_manager.explicit_log_dir={tmp_path}")


@pytest.mark.parametrize("place", ["wheel", "clone without its tests"])
def test_without_a_clone_nothing_starts(place, overrides, tmp_path, monkeypatch):
    if place == "wheel":
        monkeypatch.setattr(fake_gpu, "IS_CLONE", False)
    else:
        monkeypatch.setattr(fake_gpu, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(deep, "Worker", None)
    out = io.StringIO()
    with raises_error("preflight.deep.needs_clone", "preflight=deep", fake_gpu.PACKAGE):
        cfg = compose(*overrides, f"exp_manager.explicit_log_dir={tmp_path / 'run'}")
        preflight(
            cfg,
            Console(file=out, width=200),
        )
    assert out.getvalue() == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "number", "layers", "depths"),
    [
        (None, None, 32, (2, 4)),
        (None, None, 4, (4,)),
        (None, None, 5, (2, 4)),
        ("uniform", 1, 20, (2, 4)),
        ("uniform", 5, 20, (5, 10)),
        ("block", 8, 32, (4, 8)),
        ("block", 3, 16, (16,)),
        ("block", 16, 16, (2, 4)),
    ],
)
def test_measured_depths_keep_the_share_of_recomputed_layers(method, number, layers, depths):
    keys = {
        "model.activations_checkpoint_method": method,
        "model.activations_checkpoint_num_layers": number,
    }
    cfg = deep.with_keys(TrainConfig(), keys)
    assert deep.depths_of(cfg, layers) == depths
