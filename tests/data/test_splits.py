"""Folders with several splits or configurations: only the chosen one is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.errors import check_error, raises_error

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
    records = list(
        read_records(str(source), lambda record: record.value["prompt"], faults, split=split)
    )
    faults.raise_if_any("advice")
    return records


def check_refused(source: object, split: str | None, key: str, *values: object) -> None:
    """Check the error for reading a split, which the configuration's check also reports."""
    with pytest.raises(DataError) as raised:
        read(source, split)
    check_error(raised.value, key, *values)
    fault = source_fault(str(source), split)
    assert fault == str(raised.value), "before a model is loaded"
    assert fault is not None
    assert fault.key == key


def splits_of_datasets(
    folder: Path, cache: Path, configuration: str | None = None
) -> dict[str, list[str]]:
    """Ask `datasets` for the files of each split."""
    datasets = pytest.importorskip("datasets")
    builder = datasets.load_dataset_builder(str(folder), configuration, cache_dir=str(cache))
    names = {}
    for split, files in builder.config.data_files.items():
        names[str(split)] = sorted(str(Path(file).relative_to(folder)) for file in files)
    return names


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
def test_names_give_the_same_splits_as_in_datasets(tmp_path, names):
    folder = write(tmp_path / "folder", names)
    expected = splits_of_datasets(folder, tmp_path / "cache")
    assert sorted(name for files in expected.values() for name in files) == sorted(names)
    if len(expected) == 1:
        assert read(folder) == sorted(names)
        return
    for split, files in expected.items():
        assert sorted(read(f"{folder}:{split}")) == files
        assert sorted(read(folder, split)) == files, (
            "as model.data.data_prefix.train asks for train"
        )
    check_refused(folder, None, "data.split.several", f"{folder}:", *expected)


@pytest.mark.parametrize("name", ["Train.jsonl", "TEST.jsonl"])
def test_names_in_capitals_give_splits_too(tmp_path, name):
    folder = write(tmp_path / "folder", [name, "validation.jsonl"])
    check_refused(folder, None, "data.split.several", folder)


def test_configurations_of_a_card(tmp_path):
    folder = write(tmp_path / "gsm8k", MAIN + SOCRATIC, GSM8K_CARD)
    for configuration, names in (("main", MAIN), ("socratic", SOCRATIC)):
        expected = splits_of_datasets(folder, tmp_path / "cache", configuration)
        assert expected == {"train": [names[0]], "test": [names[1]]}
        assert read(folder / configuration, "train") == expected["train"]
        assert read(f"{folder / configuration}:test", "train") == expected["test"]
    for split in (None, "train", "test"):
        values = ("main, socratic;", f"{folder}/main")
        check_refused(folder, split, "data.configuration.several", *values)
    check_refused(folder / "main", None, "data.split.several", "main:test")
    check_refused(f"{folder / 'main'}:tset", None, "data.split.unknown", "tset;", "test, train")


def test_configurations_by_name_alone(tmp_path):
    """A folder without a card, or whose card configures no folder of this name."""
    bare = write(tmp_path / "bare", MAIN + SOCRATIC)
    check_refused(bare, "train", "data.configuration.several", "main, socratic;")
    assert read(bare / "socratic", "test") == SOCRATIC[1:]
    card = (
        "---\nconfigs:\n- config_name: hard\n  data_files: b-*.jsonl\n"
        "- {config_name: easy, data_files: [a.jsonl]}\n---\n"
    )
    flat = write(tmp_path / "flat", ["a.jsonl", "b-1.jsonl", "b-2.jsonl"], card)
    assert read(flat / "hard") == read(f"{flat}/hard:train") == ["b-1.jsonl", "b-2.jsonl"]
    assert read(flat / "easy", "train") == ["a.jsonl"]
    check_refused(flat / "hrad", None, "data.configuration.unknown", "hrad;", "hard, easy")
    assert splits_of_datasets(flat, tmp_path / "cache", "hard") == {
        "train": ["b-1.jsonl", "b-2.jsonl"]
    }


def test_the_default_of_a_card_is_taken_as_datasets_takes_it(tmp_path):
    card = GSM8K_CARD.replace("config_name: socratic\n", "config_name: socratic\n  default: true\n")
    folder = write(tmp_path / "folder", MAIN + SOCRATIC, card)
    assert splits_of_datasets(folder, tmp_path / "cache")["train"] == SOCRATIC[:1]
    assert read(folder, "train") == SOCRATIC[:1]
    assert read(folder / "main", "train") == MAIN[:1]


def test_a_card_that_fits_no_file_or_cannot_be_read(tmp_path):
    folder = write(tmp_path / "folder", MAIN, GSM8K_CARD)
    values = ("socratic/train-*", "README.md")
    check_refused(folder / "main" / "..", "train", "data.card.missing_file", *values)
    folder = write(tmp_path / "broken", MAIN, "---\nconfigs: [\n---\n")
    check_refused(folder, None, "data.card.not_yaml", folder, "README.md")
    long_number = "---\nconfigs:\n- config_name: 1" + ":1" * 200_000 + "\n---\n"
    folder = write(tmp_path / "number", MAIN, long_number)
    check_refused(folder, None, "data.card.not_yaml", "line 3: ", "400001 characters")
    folder = write(tmp_path / "no_day", MAIN, "---\nconfigs: [{config_name: 2001-99-99}]\n---\n")
    check_refused(folder, None, "data.card.not_yaml", "month must be in 1..12")
    folder = write(tmp_path / "blank", ["a.jsonl"], "---" + "\n" * 1_000_000)
    assert read(folder) == ["a.jsonl"]
    for card in ("# Only text\n", "---\nlicense: mit\n---\n"):
        folder = write(tmp_path / "plain", ["a.jsonl"], card)
        assert read(folder) == ["a.jsonl"]


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = ["one", "two"]
    saved = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in names}
    datasets.DatasetDict(train_sft=saved["one"], test_sft=saved["two"]).save_to_disk(
        tmp_path / "dict"
    )
    values = ("none of them train, test_sft, train_sft;", f"{tmp_path / 'dict'}:test_sft")
    check_refused(tmp_path / "dict", "train", "data.split.several", *values)
    write(tmp_path / "dict", ["train_sft.jsonl"])  # is not part of it
    test_sft_folder = tmp_path / "dict" / "test_sft"
    assert read(f"{tmp_path}/dict:test_sft") == read(test_sft_folder) == ["two"]
    for name in names:
        datasets.DatasetDict(train=saved[name]).save_to_disk(tmp_path / "several" / name)
    several = tmp_path / "several"
    check_refused(several, "train", "data.configuration.several", "one, two;")
    assert read(tmp_path / "several" / "two") == ["two"]


def test_data_sets_of_the_hub(tmp_path, monkeypatch):
    """`datasets` treats OWNER/NAME as a folder if it exists."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "openai" / "gsm8k", MAIN + SOCRATIC, GSM8K_CARD)
    values = ("main", "socratic", "hf:openai/gsm8k/CONFIGURATION")
    with raises_error("data.datasets.not_loaded", *values):
        read("hf:openai/gsm8k", "train")
    assert read("hf:openai/gsm8k/main", "train") == MAIN[:1]
    assert read("hf:openai/gsm8k/socratic:test", "train") == SOCRATIC[1:]
    with raises_error("data.split.several", "train, test;", "hf:openai/gsm8k/main:train"):
        read("hf:openai/gsm8k/main")
    with raises_error("data.split.several", "none of them validation, train, test;"):
        read("hf:openai/gsm8k/main", "validation")
    with raises_error("data.datasets.not_loaded", "tset", "hf:openai/gsm8k/main:SPLIT"):
        read("hf:openai/gsm8k/main:tset", "train")


def test_patterns(tmp_path):
    folder = write(tmp_path / "folder", SHARDS)
    values = ("train-0000", "test-0000")
    check_refused(f"{folder}/data/*.jsonl", "train", "data.pattern.several_splits", *values)
    assert read(f"{folder}/data/train-*.jsonl") == SHARDS[:2]
    # Of a folder that matches.
    check_refused(f"{tmp_path}/fold*", None, "data.split.several", folder, "test, train;")
    check_refused(f"{folder}/none-*.jsonl", None, "data.file.missing", f"{folder}/none-*.jsonl")


def test_files_beside_folders_are_distinguished(tmp_path):
    folder = write(tmp_path / "folder", ["a.jsonl", "old/b.jsonl"])
    values = ("a.jsonl", "old", f"'{folder}/*.jsonl'")
    check_refused(folder, "train", "data.configuration.files_beside_folders", *values)
    assert read(f"{folder}/*.jsonl") == ["a.jsonl"]
    assert read(folder / "old") == ["old/b.jsonl"]
    unnamed = write(tmp_path / "unnamed", ["train.jsonl", "more.jsonl"])
    check_refused(unnamed, "train", "data.split.files_of_none", "splits train,", "more.jsonl")
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
    """`datasets` silently chooses the format of most files."""
    folder = write(tmp_path / "folder", [*names, "test.jsonl"] if "train" in names[0] else names)
    files = [Path(name).name for name in names]
    check_refused(folder, "train", "data.split.several_forms", *files)


def test_files_that_datasets_passes_over(tmp_path):
    hidden = [".train.jsonl", ".cache/train.jsonl", "_train.jsonl", "__pycache__/train.jsonl"]
    folder = write(tmp_path / "folder", ["train.jsonl", *hidden])
    assert splits_of_datasets(folder, tmp_path / "cache") == {
        "train": ["_train.jsonl", "train.jsonl"]
    }
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
    ("card", "key", "value"),
    [
        (
            "a: &a [x, x]\nconfigs: [{config_name: *a, data_files: a.jsonl}]",
            "data.card.not_yaml",
            "(*a)",
        ),
        (
            "configs: [{config_name: a, data_files: '**/**/**/*.jsonl'}]",
            "data.card.wide_pattern",
            "**/**/**/*.jsonl;",
        ),
    ],
)
def test_a_card_that_takes_for_ever_is_refused(tmp_path, card, key, value):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    with raises_error(key, value):
        choose_files(tmp_path)


def test_a_card_whose_configs_is_not_a_list_is_refused(tmp_path):
    folder = write(tmp_path / "folder", ["a.jsonl"], "---\nconfigs:\n  data_files: a.jsonl\n---\n")
    check_refused(folder, None, "data.card.configs_not_a_list", folder, "README.md")


def test_a_folder_named_data_is_not_a_configuration(tmp_path):
    names = ["data/train.jsonl", "test.jsonl"]
    folder = write(tmp_path / "folder", names)
    expected = {"train": names[:1], "test": names[1:]}
    assert splits_of_datasets(folder, tmp_path / "cache") == expected
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
    check_refused(tmp_path / "none:train", None, "data.file.missing", "none:train")


def test_links_of_the_hub_cache(tmp_path):
    blobs = write(tmp_path / "blobs", ["1", "2"])
    snapshot = tmp_path / "snapshots" / "abc" / "data"
    snapshot.mkdir(parents=True)
    for blob, name in (("1", "train-00000-of-00001.jsonl"), ("2", "test-00000-of-00001.jsonl")):
        (snapshot / name).symlink_to(blobs / blob)
    (snapshot / "loop").symlink_to(snapshot)
    assert read(snapshot.parent, "test") == ["2"]
    check_refused(snapshot.parent, None, "data.split.several", "test, train;")
