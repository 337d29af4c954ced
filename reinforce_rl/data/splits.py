"""Find the configurations and splits in a folder of data files, by the rules of `datasets`.

Torch-free.

A data set's card (`README.md`, `configs:`) comes first, then `save_to_disk`, then names of files
and folders: https://huggingface.co/docs/hub/datasets-data-files-configuration
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from reinforce_rl.errors import DataError
from reinforce_rl.utils.untrusted_files import (
    MAX_JSON_DEPTH,
    UnreadableFileError,
    parse_yaml,
    read_bounded,
)

_MAX_RECURSIVE = 2  # "**" in a pattern of a data set's card
SUFFIX = re.compile(
    r"(\.jsonl|\.ndjson|\.json|\.csv|\.tsv|\.parquet)?(?:\.gz|\.bz2|\.xz|\.zst)?$", re.IGNORECASE
)
_KEYWORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
# A keyword stands between the characters that `datasets` treats as separators.
_KEYWORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_KEYWORDS)})(?=[-._ 0-9]|$)", re.IGNORECASE)
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
_MAX_CARD_BYTES = 16 << 20
_MAX_CARD_VALUES = 200_000  # keys and values of its YAML
# White space of one line: "\s*" would match across lines, and take quadratic time for many lines.
_CARD = re.compile(r"---[^\S\n]*\n(.*?)\n---[^\S\n]*(?:\n|$)", re.DOTALL)
_JSON_FORMS = (".jsonl", ".ndjson", ".json")
_MANY = 6  # names in a message


def suffix_of(name: str) -> str:
    """Return the lower-case suffix of a file's format; a suffix of a compression is left out.

    Empty for an unknown format.
    """
    return SUFFIX.findall(name)[0].lower()


@dataclass(frozen=True)
class Part:
    """The files of one split of one configuration."""

    configuration: str  # "" in a folder of one
    split: str  # "" if the names contain none
    files: tuple[Path, ...]


def choose_files(
    folder: Path, configuration: str = "", split: str = "", default: str | None = None
) -> list[Path]:
    """Return the files of one split of one configuration.

    Args:
        configuration: "" for the only configuration, or for the card's default.
        split: "" for `default` if there are several splits. `default` is None if nothing names a
            split.

    Raises:
        DataError: there are several configurations or splits and none was chosen, or the chosen one
            does not exist.
    """
    parts, preferred = _parts_of(folder)
    if not parts:
        raise DataError(
            "is a folder without a file of a known format",
            key="data.folder.no_known_file",
        )
    names = list(dict.fromkeys(part.configuration for part in parts))
    if configuration and configuration not in names:
        raise DataError(
            f"has no configuration {configuration}; expected one of {_listed(names)}",
            key="data.configuration.unknown",
        )
    is_preferred = bool(preferred) and preferred in names
    if not configuration and len(names) > 1 and not is_preferred:
        if "" in names:
            example = next(part.files[0].name for part in parts if not part.configuration)
            folders = _listed(filter(None, names))
            pattern = f"{folder}/*{SUFFIX.findall(example)[0]}"
            raise DataError(
                f"has data files, such as {example}, and folders with data files, {folders}; give "
                f"one of these folders, or a pattern: '{pattern}'",
                key="data.configuration.files_beside_folders",
            )
        raise DataError(
            f"has several configurations: {_listed(names)}; choose one: {folder / names[0]}",
            key="data.configuration.several",
        )
    wanted = configuration or (preferred if is_preferred else names[0])
    chosen = {part.split: list(part.files) for part in parts if part.configuration == wanted}
    place = f"{folder / wanted}" if len(names) > 1 or configuration else f"{folder}"
    files = _of_split(chosen, place, split, default)
    _refuse_copies(files)
    return files


def _refuse_copies(files: Iterable[Path]) -> None:
    """Raise DataError if files hold a split in several forms.

    These may be the same records twice.
    """
    by_form: dict[str, Path] = {}
    by_stem: dict[Path, Path] = {}
    for path in files:
        form = suffix_of(path.name)
        by_form.setdefault("json" if form in _JSON_FORMS else form, path)
        stem = path.with_name(SUFFIX.sub("", path.name))
        other = by_stem.setdefault(stem, path)
        examples = [other, path] if other != path else list(by_form.values())
        if len(examples) > 1:
            names = " and ".join(example.name for example in examples)
            raise DataError(
                f"has one split in several formats, {names}, which may hold the same records; give "
                f"one of these files, such as {path}, or a pattern",
                key="data.split.several_forms",
            )


def _of_split(
    chosen: Mapping[str, list[Path]], place: str, split: str, default: str | None
) -> list[Path]:
    named = [name for name in chosen if name]
    if split:
        name = split if split in chosen else _KEYWORDS.get(split, split)
        if name not in chosen:
            raise DataError(
                f"has no split {split}; expected one of {_listed(named) or 'none'}",
                key="data.split.unknown",
            )
        return chosen[name]
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    if "" in chosen:
        raise DataError(
            f"has files of the splits {_listed(named)}, and files whose names contain no split, "
            f"such as {chosen[''][0].name}; give single files, or a pattern, or one split: "
            f"{place}:{named[0]}",
            key="data.split.files_of_none",
        )
    if default is not None and default in chosen:
        return chosen[default]
    missing = f"none of them {default}, " if default else ""
    raise DataError(
        f"has several splits, {missing}{_listed(named)}; choose one: {place}:{named[0]}",
        key="data.split.several",
    )


def one_split(paths: Iterable[Path], root: Path) -> list[Path]:
    """Return the files that a pattern matched.

    Raises DataError if their names tell several splits.
    """
    files = list(paths)
    by_split = {_split_of(path.relative_to(root)): path for path in files}
    by_split.pop("", None)
    if len(by_split) > 1:
        examples = ", ".join(f"{name} ({path.name})" for name, path in by_split.items())
        raise DataError(
            f"matches several splits: {examples}; narrow the pattern, or give the files as a list",
            key="data.pattern.several_splits",
        )
    return files


def card_configurations(folder: Path) -> list[str]:
    """Return the names of the configurations that the data set's card defines."""
    return [str(config.get("config_name", "default")) for config in _card(folder)]


def _parts_of(folder: Path) -> tuple[list[Part], str]:
    """Return the parts of a folder, and the configuration that its card prefers; "" for none."""
    configs = _card(folder)
    if configs:
        preferred = [
            str(config.get("config_name", "default"))
            for config in configs
            if config.get("default") or config.get("config_name", "default") == "default"
        ]
        parts = [part for config in configs for part in _parts_of_card(folder, config)]
        return parts, next(iter(preferred), "")
    return _parts_by_name(folder), ""


def _parts_by_name(folder: Path) -> list[Part]:
    """Return the parts by the names of files and folders."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for path in _data_files(folder):
        relative = path.relative_to(folder)
        groups.setdefault((_configuration_of(relative), _split_of(relative)), []).append(path)
    return [Part(*names, tuple(files)) for names, files in sorted(groups.items())]


def _card(folder: Path) -> list[dict[str, Any]]:
    """Return the `configs` of README.md that name files."""
    try:
        content = read_bounded(folder / "README.md", max_bytes=_MAX_CARD_BYTES)
    except FileNotFoundError:
        return []
    except UnreadableFileError as error:
        raise DataError(f"cannot be read: {error}", key=error.key) from error
    text = content.decode("utf-8", "replace")
    front_matter = _CARD.match(text)
    try:
        card = _parse_card(front_matter[1]) if front_matter else None
    except ValueError as error:
        raise DataError(
            f"has a README.md whose YAML cannot be read: {error}",
            key="data.card.not_yaml",
        ) from error
    configs = (card.get("configs") if isinstance(card, dict) else None) or []
    if not isinstance(configs, list):
        raise DataError(
            "has a README.md whose configs is not a list; `datasets` expects a list",
            key="data.card.configs_not_a_list",
        )
    return [
        config
        for config in configs
        if isinstance(config, dict) and ("data_files" in config or "data_dir" in config)
    ]


def _parse_card(text: str) -> Any:
    # A card lists each of its files, and some list thousands, so use the loader in C if it exists.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    first_line = "\n"  # so that line numbers are those of the file
    return parse_yaml(
        first_line + text, max_depth=MAX_JSON_DEPTH, max_values=_MAX_CARD_VALUES, loader=loader
    )


def _parts_of_card(folder: Path, config: Mapping[str, Any]) -> Iterator[Part]:
    name = str(config.get("config_name", "default"))
    data_dir = str(config.get("data_dir") or "")
    base = _below(folder, data_dir, name)
    data_files = config.get("data_files")
    if data_files is None:
        for part in _parts_by_name(base):
            yield Part(name, part.split, part.files)
        return
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, dict) and "path" in entry:
            by_split = {str(entry.get("split", "train")): entry["path"]}
        else:
            by_split = entry if isinstance(entry, dict) else {"train": entry}
        for split, paths in by_split.items():
            patterns.setdefault(str(split), []).extend(
                map(str, paths if isinstance(paths, list) else [paths])
            )
    for split, globs in patterns.items():
        files: dict[Path, None] = {}
        for pattern in globs:
            _below(base, pattern.lstrip("/"), name)
            # `datasets` lets "**" at the end match files too.
            wanted = re.sub(r"(^|/)\*\*$", r"\1**/*", pattern.lstrip("/"))
            # Each "**" matches every folder below every match of the "**" before it.
            if wanted.count("**") > _MAX_RECURSIVE:
                raise DataError(
                    f"has a README.md that names {pattern[:100]}; "
                    f"expected at most {_MAX_RECURSIVE} **",
                    key="data.card.wide_pattern",
                )
            matches = sorted(
                path for path in base.glob(wanted) if path.is_file() and not _is_hidden(path, base)
            )
            if not matches:
                raise DataError(
                    f"has no file {pattern}, which its README.md names for {name}, {split}",
                    key="data.card.missing_file",
                )
            files.update(dict.fromkeys(matches))
        yield Part(name, split, tuple(files))


def _below(folder: Path, relative: str, name: str) -> Path:
    """Return a path that a README.md gives for a configuration.

    Raises DataError if it could leave the folder.
    """
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise DataError(
            f"has a README.md that names {relative} for {name}; expected files of this folder",
            key="data.card.path_outside",
        )
    return folder / relative


def _is_hidden(path: Path, base: Path) -> bool:
    """Tell whether `datasets` ignores a file.

    It ignores hidden files and folders whose name begins with "." or "__".
    """
    folders = path.relative_to(base).parts[:-1]
    return path.name.startswith(".") or any(name.startswith((".", "__")) for name in folders)


def _data_files(folder: Path) -> Iterator[Path]:
    """Yield files of known forms and `save_to_disk` folders, in a folder and below, by path."""
    if (folder / "state.json").exists():  # by `Dataset.save_to_disk`
        yield folder
        return
    is_dict = (folder / "dataset_dict.json").exists()  # by `DatasetDict.save_to_disk`
    entries = sorted(folder.iterdir())
    for path in entries:
        if path.name.startswith((".", "_", "dataset_info", "dataset_dict.json")):
            continue
        if path.is_dir():
            # A link may lead back to a parent folder.
            if not os.path.islink(path) or (path / "state.json").exists():
                yield from _data_files(path)
        elif suffix_of(path.name) and not is_dict:
            yield path


def _configuration_of(relative: PurePath) -> str:
    """Return a file's folders joined by "/", without `data` and the names of splits."""
    folders = relative.parts[:-1]
    return "/".join(name for name in folders if name != "data" and not _keyword(name))


def _split_of(relative: PurePath) -> str:
    of_folders = [split for name in relative.parts[:-1] if (split := _keyword(name))]
    shard = _SHARD.match(relative.name)
    if shard and (_keyword(shard[1]) or not of_folders):
        # Matches train_sft, but not the "part" of train/part-00000-of-00001.
        return _KEYWORDS.get(shard[1].lower(), shard[1])
    if not suffix_of(relative.name):  # a folder of `save_to_disk`, named after its split
        return _KEYWORDS.get(relative.name, relative.name)
    return of_folders[-1] if of_folders else _keyword(relative.name)


def _keyword(name: str) -> str:
    match = _KEYWORD.search(name)
    return _KEYWORDS[match[1].lower()] if match else ""


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    rest = f" and {len(all_names) - _MANY} more" if len(all_names) > _MANY else ""
    return ", ".join(all_names[:_MANY]) + rest
