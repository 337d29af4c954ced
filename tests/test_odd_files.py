"""Folders of others: an entry that is not a regular file of the folder is a `ReinforceError`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import keys_of, raises_error
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.config.model_folder import model_values
from reinforce_rl.data.jsonl import LineFaults
from reinforce_rl.data.readers import files_of, read_records
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ReinforceError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpoint_files import check_files
from reinforce_rl.megatron.checkpointer import checkpoint_up_to, latest_checkpoint
from reinforce_rl.megatron.hf_weights import carry_over
from reinforce_rl.megatron.weight_files import find_weight_files
from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.monitoring.records import read_rows as read_samples
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.step_record import read_record
from reinforce_rl.runtime.settings import settings_of
from reinforce_rl.runtime.status import read_status, run_status, saved_step
from reinforce_rl.runtime.stored_config import read_stored
from reinforce_rl.utils.untrusted_files import UnreadableFileError

pytestmark = pytest.mark.timeout(30)

SECRET = "the secret of another folder"


def link_out(path: Path) -> None:
    outside = path.parents[2] / "secret"
    outside.write_text(SECRET)
    path.symlink_to(outside)


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "link out": link_out,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00\n"),
    "nul": lambda path: path.write_bytes(b"\0" * 1000 + b"\n"),
    "depth": lambda path: path.write_text("[" * 100_000 + "]" * 100_000 + "\n"),
    "objects": lambda path: path.write_text('{"step":' * 50_000 + "1" + "}" * 50_000 + "\n"),
    "number": lambda path: path.write_text('{"step": 1' + "0" * 5000 + "}\n"),
    "large number": lambda path: path.write_text('{"step": 1' + "0" * 400 + "}\n"),
}


LINKS = ("device", "terminal", "link out")


def read_latest(run: Path) -> object:
    return latest_checkpoint(run / "checkpoints")


READERS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": lambda run: read_metrics(run / "metrics.jsonl"),
    "config.yaml": lambda run: read_stored(run / "config.yaml"),
    "config_history.jsonl": lambda run: read_metrics(run / "config_history.jsonl"),
    "rollouts/step_00001.parquet": lambda run: read_samples(
        run / "rollouts" / "step_00001.parquet"
    ),
    "rollouts/step_00001.jsonl": lambda run: read_samples(run / "rollouts" / "step_00001.jsonl"),
    "record/step_00001.json": lambda run: read_record(run, 1),
    "checkpoints/step_00000001/trainer_state.json": read_latest,
    "checkpoints/step_00000001/manifest.json": lambda run: check_files(
        run / "checkpoints" / "step_00000001", 0, 1
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_of_a_run_is_an_error_of_the_project(name, kind, tmp_path):
    run = tmp_path / "a" / "run"
    path = run / name
    path.parent.mkdir(parents=True)
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "latest").write_text("step_00000001\n")
    ODD[kind](path)
    if name == "config.yaml" and kind in ("depth", "objects", "number", "large number", "nul"):
        pytest.skip("the text is read, and parsed elsewhere")
    with pytest.raises((ReinforceError, UnreadableFileError)) as caught:
        READERS[name](run)
    assert path.name in str(caught.value) and SECRET not in str(caught.value)
    assert len(str(caught.value)) < 1500
    if kind in LINKS:  # not what is behind it
        assert str(path.resolve()) in str(caught.value)


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_status_or_pointer_is_none(kind, tmp_path):
    run = tmp_path / "a" / "run"
    (run / "checkpoints").mkdir(parents=True)
    ODD[kind](run / "status.json")
    ODD[kind](run / "checkpoints" / "latest")
    assert read_status(run) is None
    assert run_status(run).state == "unknown"
    assert saved_step(run) == 0


READ_AS_IT_IS = [
    ("chat_template.jinja", kind) for kind in ("depth", "objects", "number", "large number", "nul")
]


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "folder"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_an_odd_file_of_a_model_is_an_error_of_the_project(name, kind, tmp_path):
    model = tmp_path / "a" / "model"
    write_tiny_tokenizer(model, 160)
    (model / name).unlink(missing_ok=True)
    ODD[kind](model / name)
    if name == "config.json":
        assert model_values(str(model)) == {} or "number" in kind
        with pytest.raises(ReinforceError) as caught:
            Architecture.from_folder(model)
        assert "config.json" in str(caught.value)
        assert all(keys_of(caught.value))
    elif (name, kind) in READ_AS_IT_IS or (name != "tokenizer.json" and kind == "loop"):
        # a link to nothing
        assert load_tokenizer(model)
    else:
        with pytest.raises(ReinforceError) as caught:
            load_tokenizer(model)
        assert str(model) in str(caught.value) and SECRET not in str(caught.value)
        if kind in LINKS:
            assert str((model / name).resolve()) in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "device", "link out"])
def test_weights_are_regular_files_of_the_folder(kind, tmp_path):
    model = tmp_path / "a" / "model"
    model.mkdir(parents=True)
    ODD[kind](model / "model.safetensors")
    key = "file.not_regular" if kind == "fifo" else "file.link.leads_out"
    with raises_error(key, model / "model.safetensors"):
        find_weight_files(model)


def test_an_index_that_leaves_the_folder_is_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "other.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "../other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    named = (model / "model.safetensors.index.json", "../other.safetensors")
    with raises_error("model.index.file_elsewhere", *named):
        find_weight_files(model)


def test_nothing_from_outside_is_copied_into_an_exported_model(tmp_path):
    source = tmp_path / "a" / "model"
    source.mkdir(parents=True)
    link_out(source / "tokenizer.json")
    (tmp_path / "out").mkdir()
    named = (source / "tokenizer.json", tmp_path / "secret")
    with raises_error("file.link.leads_out", *named):
        carry_over(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_hubs_cache_is_read_through_its_links(tmp_path):
    plain = tmp_path / "plain"
    write_tiny_tokenizer(plain, 160)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(load_tokenizer(snapshot)) >= 160
    (snapshot / "tokenizer.json").unlink()
    (tmp_path / "outside.json").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../../outside.json")
    named = (snapshot / "tokenizer.json", tmp_path / "outside.json")
    with raises_error("file.link.leads_out", *named):
        load_tokenizer(snapshot)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("fifo", "file.not_regular"),
        ("device", "file.not_regular"),
        ("loop", "file.not_readable"),
    ],
)
def test_an_odd_file_in_a_folder_of_data_is_named(kind, key, tmp_path):
    folder = tmp_path / "a" / "data"
    folder.mkdir(parents=True)
    (folder / "train-a.jsonl").write_text('{"prompt": "x"}\n')
    ODD[kind](folder / "train-b.jsonl")
    with raises_error(key, folder / "train-b.jsonl"):
        list(read_records(folder, lambda record: record, LineFaults(), split="train"))


@pytest.mark.parametrize(
    "named", ["data_files: ../secret.jsonl", "data_dir: ..", "data_dir: /etc", "data_dir: ."]
)
def test_a_card_of_data_does_not_lead_out_of_its_folder(named, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"prompt": "x"}\n')
    (folder / "train.jsonl").write_text('{"prompt": "x"}\n')
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {named}\n---\n")
    if named == "data_dir: .":
        assert files_of(folder) == [folder / "train.jsonl"]
    else:
        values = (folder, "README.md", named.split()[1])
        with raises_error("data.card.path_outside", *values):
            files_of(folder)


def test_a_run_of_which_a_file_leads_out_shows_nothing_of_it(tmp_path):
    run = tmp_path / "a" / "run"
    run.mkdir(parents=True)
    link_out(run / "metrics.jsonl")
    with raises_error("file.link.leads_out", run / "metrics.jsonl"):
        RunFolder(run).refresh()
    (run / "metrics.jsonl").unlink()
    link_out(run / "config_history.jsonl")
    with raises_error("file.link.leads_out", run / "config_history.jsonl"):
        settings_of(run, 1)
    assert checkpoint_up_to(run / "checkpoints", 1) is None
