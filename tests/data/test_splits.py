"""Folders of several splits or configurations: one is read if it is chosen, never several as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reinforce_rl.data.jsonl import LineFaults
from reinforce_rl.data.readers import files_of, read_records, source_fault
from reinforce_rl.data.splits import choose_files
from reinforce_rl.errors import DataError

GSM8K_CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
  - split: test
    path: [socratic/test-*]
---

# GSM8K
"""
MAIN = ["main/train-00000-of-00001.jsonl", "main/test-00000-of-00001.jsonl"]
SOCRATIC = ["socratic/train-00000-of-00001.jsonl", "socratic/test-00000-of-00001.jsonl"]
SHARDS = [
    "data/train-00000-of-00002.jsonl",
    "data/train-00001-of-00002.jsonl",
    "data/test-00000-of-00001.jsonl",
]
SFT_AND_PREFS = ["data/train_sft-00000-of-00001.jsonl", "data/train_prefs-00000-of-00001.jsonl"]


def write(folder: Path, names: list[str], card: str = "") -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"prompt": name}) + "\n")
    if card:
        (folder / "README.md").write_text(card)
    return folder


def read(source: object, split: str | None = None) -> list[str]:
    faults = LineFaults()
    records = list(read_records(str(source), lambda record: record.value["prompt"], faults, split=split))
    faults.raise_if_any("advice")
    return records


def refused(source: object, split: str | None = None) -> str:
    with pytest.raises(DataError) as raised:
        read(source, split)
    assert source_fault(str(source), split) == str(raised.value), "before a model is loaded"
    return str(raised.value)


def splits_of_datasets(folder: Path, cache: Path, configuration: str | None = None) -> dict[str, list[str]]:
    """Ask `datasets` for the files of each split."""
    datasets = pytest.importorskip("datasets")
    builder = datasets.load_dataset_builder(str(folder), configuration, cache_dir=str(cache))
    return {
        str(split): sorted(str(Path(file).relative_to(folder)) for file in files)
        for split, files in builder.config.data_files.items()
    }


@pytest.mark.parametrize(
    "names",
    [
        SHARDS,
        SFT_AND_PREFS,
        ["train.jsonl", "test.jsonl"],
        ["train.jsonl", "dev.jsonl"],
        ["training.jsonl", "testing.jsonl", "valid.jsonl"],
        ["my_train_set.jsonl", "my-eval.jsonl", "my validation.jsonl"],
        ["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"],
        ["data/training/part-00000-of-00001.jsonl", "data/evaluation/part-00000-of-00001.jsonl"],
        ["train1.jsonl", "train2.jsonl", "test1.jsonl"],
        ["easy.jsonl", "hard.jsonl"],
        ["contest.jsonl", "latest.jsonl", "devices.jsonl"],
        ["only/a.jsonl"],
    ],
    ids=lambda names: names[0],
)
def test_names_tell_the_splits_that_they_tell_datasets(tmp_path, names):
    folder = write(tmp_path / "folder", names)
    expected = splits_of_datasets(folder, tmp_path / "cache")
    assert sorted(name for files in expected.values() for name in files) == sorted(names)
    if len(expected) == 1:
        assert read(folder) == sorted(names)
        return
    for split, files in expected.items():
        assert sorted(read(f"{folder}:{split}")) == files
        assert sorted(read(folder, split)) == files, "as model.data.data_prefix.train asks for train"
    said = refused(folder)
    assert "has several splits, " in said and f"{folder}:" in said
    assert all(split in said for split in expected)


@pytest.mark.parametrize("name", ["Train.jsonl", "TEST.jsonl"])
def test_names_in_capitals_tell_splits_too(tmp_path, name):
    folder = write(tmp_path / "folder", [name, "validation.jsonl"])
    assert "has several splits" in refused(folder)


def test_configurations_of_a_card(tmp_path):
    folder = write(tmp_path / "gsm8k", MAIN + SOCRATIC, GSM8K_CARD)
    for configuration, names in (("main", MAIN), ("socratic", SOCRATIC)):
        expected = splits_of_datasets(folder, tmp_path / "cache", configuration)
        assert expected == {"train": [names[0]], "test": [names[1]]}
        assert read(folder / configuration, "train") == expected["train"]
        assert read(f"{folder / configuration}:test", "train") == expected["test"]
    for split in (None, "train", "test"):
        said = refused(folder, split)
        assert "has several configurations: main, socratic" in said and f"{folder}/main" in said
    assert "main:test" in refused(folder / "main")
    assert "expected one of" in refused(f"{folder / 'main'}:tset")


def test_configurations_by_name_alone(tmp_path):
    """Without a card, and where a card's configuration is no folder of that name."""
    bare = write(tmp_path / "bare", MAIN + SOCRATIC)
    assert "has several configurations: main, socratic" in refused(bare, "train")
    assert read(bare / "socratic", "test") == SOCRATIC[1:]
    card = (
        "---\nconfigs:\n- config_name: hard\n  data_files: b-*.jsonl\n"
        "- {config_name: easy, data_files: [a.jsonl]}\n---\n"
    )
    flat = write(tmp_path / "flat", ["a.jsonl", "b-1.jsonl", "b-2.jsonl"], card)
    assert read(flat / "hard") == read(f"{flat}/hard:train") == ["b-1.jsonl", "b-2.jsonl"]
    assert read(flat / "easy", "train") == ["a.jsonl"]
    assert "has no configuration hrad; expected one of hard, easy" in refused(flat / "hrad")
    assert splits_of_datasets(flat, tmp_path / "cache", "hard") == {"train": ["b-1.jsonl", "b-2.jsonl"]}


def test_the_default_of_a_card_is_taken_as_datasets_takes_it(tmp_path):
    card = GSM8K_CARD.replace("config_name: socratic\n", "config_name: socratic\n  default: true\n")
    folder = write(tmp_path / "folder", MAIN + SOCRATIC, card)
    assert splits_of_datasets(folder, tmp_path / "cache")["train"] == SOCRATIC[:1]
    assert read(folder, "train") == SOCRATIC[:1]
    assert read(folder / "main", "train") == MAIN[:1]


def test_a_card_that_fits_no_file_or_cannot_be_read(tmp_path):
    folder = write(tmp_path / "folder", MAIN, GSM8K_CARD)
    said = refused(folder / "main" / "..", "train")
    assert "socratic/train-*" in said and "README.md" in said
    folder = write(tmp_path / "broken", MAIN, "---\nconfigs: [\n---\n")
    assert "README.md whose YAML cannot be read" in refused(folder)
    long_number = "---\nconfigs:\n- config_name: 1" + ":1" * 200_000 + "\n---\n"
    folder = write(tmp_path / "number", MAIN, long_number)
    assert "cannot be read: line 3: a number of 400001 characters" in refused(folder)
    folder = write(tmp_path / "no_day", MAIN, "---\nconfigs: [{config_name: 2001-99-99}]\n---\n")
    assert "cannot be read: not valid YAML: month must be in 1..12" in refused(folder)
    folder = write(tmp_path / "blank", ["a.jsonl"], "---" + "\n" * 1_000_000)
    assert read(folder) == ["a.jsonl"]
    for card in ("# Only text\n", "---\nlicense: mit\n---\n"):
        folder = write(tmp_path / "plain", ["a.jsonl"], card)
        assert read(folder) == ["a.jsonl"]


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = ["one", "two"]
    saved = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in names}
    datasets.DatasetDict(train_sft=saved["one"], test_sft=saved["two"]).save_to_disk(tmp_path / "dict")
    said = refused(tmp_path / "dict", "train")
    assert "none of them train, test_sft, train_sft; choose one: " in said
    write(tmp_path / "dict", ["train_sft.jsonl"])  # is no part of it
    assert read(f"{tmp_path}/dict:test_sft") == read(tmp_path / "dict" / "test_sft") == ["two"]
    for name in names:
        datasets.DatasetDict(train=saved[name]).save_to_disk(tmp_path / "several" / name)
    assert "has several configurations: one, two" in refused(tmp_path / "several", "train")
    assert read(tmp_path / "several" / "two") == ["two"]


def test_data_sets_of_the_hub(tmp_path, monkeypatch):
    """`datasets` takes OWNER/NAME for a folder where there is one."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "openai" / "gsm8k", MAIN + SOCRATIC, GSM8K_CARD)
    with pytest.raises(DataError, match=r"(?s)main.*socratic.*choose one: hf:openai/gsm8k/CONFIGURATION"):
        read("hf:openai/gsm8k", "train")
    assert read("hf:openai/gsm8k/main", "train") == MAIN[:1]
    assert read("hf:openai/gsm8k/socratic:test", "train") == SOCRATIC[1:]
    with pytest.raises(DataError, match=r"has several splits, train, test; choose one: hf:openai/gsm8k/main:train"):
        read("hf:openai/gsm8k/main")
    with pytest.raises(DataError, match=r"none of them validation, train, test"):
        read("hf:openai/gsm8k/main", "validation")
    with pytest.raises(DataError, match=r"(?s)tset.*choose one: hf:openai/gsm8k/main:SPLIT"):
        read("hf:openai/gsm8k/main:tset", "train")


def test_patterns(tmp_path):
    folder = write(tmp_path / "folder", SHARDS)
    said = refused(f"{folder}/data/*.jsonl", "train")
    assert "matches several splits: " in said and "train-0000" in said and "test-0000" in said
    assert read(f"{folder}/data/train-*.jsonl") == SHARDS[:2]
    assert "has several splits, test, train" in refused(f"{tmp_path}/fold*"), "of a folder that matches"
    assert refused(f"{folder}/none-*.jsonl").endswith("does not exist")


def test_files_beside_folders_are_told_apart(tmp_path):
    folder = write(tmp_path / "folder", ["a.jsonl", "old/b.jsonl"])
    said = refused(folder, "train")
    assert "a.jsonl" in said and "old" in said and f"'{folder}/*.jsonl'" in said
    assert read(f"{folder}/*.jsonl") == ["a.jsonl"]
    assert read(folder / "old") == ["old/b.jsonl"]
    unnamed = write(tmp_path / "unnamed", ["train.jsonl", "more.jsonl"])
    assert "train and others whose names tell no split, such as more.jsonl" in refused(unnamed, "train")
    assert read(f"{unnamed}:train") == ["train.jsonl"]


@pytest.mark.parametrize(
    "names",
    [
        ["train.json", "train.parquet"],
        ["train.jsonl", "train.jsonl.gz"],
        ["data/train.csv", "data/train-more.jsonl"],
        ["a.jsonl", "a.json"],
    ],
    ids=lambda names: names[1],
)
def test_one_split_in_two_forms_is_refused(tmp_path, names):
    """`datasets` takes the form of most files, without a word."""
    folder = write(tmp_path / "folder", [*names, "test.jsonl"] if "train" in names[0] else names)
    said = refused(folder, "train")
    assert all(Path(name).name in said for name in names)


def test_files_that_datasets_passes_over(tmp_path):
    hidden = [".train.jsonl", ".cache/train.jsonl", "_train.jsonl", "__pycache__/train.jsonl"]
    folder = write(tmp_path / "folder", ["train.jsonl", *hidden])
    assert splits_of_datasets(folder, tmp_path / "cache") == {"train": ["_train.jsonl", "train.jsonl"]}
    assert read(folder) == ["train.jsonl"], "one that begins with _ is left out too"
    card = "---\nconfigs:\n- config_name: default\n  data_files: {pattern}\n---\n"
    for number, pattern in enumerate(("data/*", "data/**", "/data/**", "data/**/*.jsonl")):
        carded = write(
            tmp_path / f"carded-{number}",
            ["data/a.jsonl", "data/.a.jsonl", "data/.old/a.jsonl"],
            card.format(pattern=f'"{pattern}"'),
        )
        assert read(carded) == ["data/a.jsonl"]
        if not pattern.startswith("/"):
            assert splits_of_datasets(carded, tmp_path / "cache") == {"train": ["data/a.jsonl"]}


@pytest.mark.parametrize(
    ("card", "fault"),
    [
        ("a: &a [x, x]\nconfigs: [{config_name: *a, data_files: a.jsonl}]", "alias"),
        ("configs: [{config_name: a, data_files: '**/**/**/*.jsonl'}]", "pattern"),
    ],
)
def test_a_card_that_takes_for_ever_is_refused(tmp_path, card, fault):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    with pytest.raises(DataError, match=fault):
        choose_files(tmp_path)


def test_a_card_whose_configs_is_no_list_is_refused(tmp_path):
    folder = write(tmp_path / "folder", ["a.jsonl"], "---\nconfigs:\n  data_files: a.jsonl\n---\n")
    assert "README.md whose configs is no list" in refused(folder)


def test_a_folder_named_data_is_no_configuration(tmp_path):
    names = ["data/train.jsonl", "test.jsonl"]
    folder = write(tmp_path / "folder", names)
    assert splits_of_datasets(folder, tmp_path / "cache") == {"train": names[:1], "test": names[1:]}
    assert read(folder, "train") == names[:1]


def test_a_split_by_another_of_its_names(tmp_path):
    folder = write(tmp_path / "folder", ["train.jsonl", "validation.jsonl"])
    assert read(f"{folder}:dev") == ["validation.jsonl"]
    assert read(f"{write(tmp_path / 'other', ['train.jsonl', 'notes.jsonl'])}/*.jsonl") == [
        "notes.jsonl",
        "train.jsonl",
    ], "a pattern says which files are meant"


def test_a_colon_in_a_name(tmp_path):
    write(tmp_path, ["a:train.jsonl", "c:d/x.jsonl"])
    assert read(tmp_path / "a:train.jsonl") == ["a:train.jsonl"]
    assert files_of(tmp_path / "c:d") == [tmp_path / "c:d" / "x.jsonl"]
    assert refused(tmp_path / "none:train").endswith("none:train does not exist")


def test_links_of_the_hub_cache(tmp_path):
    blobs = write(tmp_path / "blobs", ["1", "2"])
    snapshot = tmp_path / "snapshots" / "abc" / "data"
    snapshot.mkdir(parents=True)
    for blob, name in (("1", "train-00000-of-00001.jsonl"), ("2", "test-00000-of-00001.jsonl")):
        (snapshot / name).symlink_to(blobs / blob)
    (snapshot / "loop").symlink_to(snapshot)
    assert read(snapshot.parent, "test") == ["2"]
    assert "has several splits, test, train" in refused(snapshot.parent)
