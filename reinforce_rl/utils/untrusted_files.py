"""Reads untrusted files: regular files only, links within a folder only, within size bounds."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from reinforce_rl.errors import DataError

MAX_JSON_BYTES = 64 << 20  # of a file that is one JSON value
MAX_JSON_DEPTH = 100
MAX_CONFIG_BYTES = 1 << 20  # of a configuration in YAML
MAX_YAML_DEPTH = 32  # of a configuration
MAX_YAML_VALUES = 10_000  # keys, values and lists of a configuration, all together
_MAX_DIGITS = 40  # of an integer
_LONG_NUMBER = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1}}}")
_YAML_NUMBER = re.compile(r"[-+]?0[bx][0-9a-fA-F_]+|[-+]?[0-9.][0-9_.:]*(?:[eE][-+]?[0-9]+)?")
# The form of OmegaConf. PyYAML's own float needs a point, and a sign in the exponent.
_YAML_FLOAT = re.compile(
    r"""^(?:
        [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN)
    )$""",
    re.VERBOSE,
)
_YAML_DIRECTIVE = re.compile("(?:^|[\n\r\x85\u2028\u2029])%")
_SHOWN = 200  # characters of a value in a message
_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnreadableFileError(DataError, OSError):
    """A path cannot be read safely.

    The message is a sentence: the path, what it is, and what was expected.
    """


def open_regular(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a regular file for reading, without waiting for a writer.

    A link is followed; if `within` is given, only to a file inside this folder.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFileError: it is not a regular file, leads out of `within`, or may not be read.
    """
    try:
        # Opening a device can have side effects, so it is refused before it is opened.
        _check(path, path.stat().st_mode, within)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except UnreadableFileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        _refuse(path, error)
    file = os.fdopen(handle, "rb")
    try:
        # The path may have been replaced since the first check.
        _check(path, os.fstat(handle).st_mode, None)
        if within is not None:
            _check_inside(path, Path(os.readlink(f"/proc/self/fd/{handle}")), within)
    except BaseException:
        file.close()
        raise
    return file


def check_regular(path: Path, *, within: Path | None = None) -> None:
    """Raise the errors of `open_regular`, for a file that a library opens by its path."""
    open_regular(path, within=within).close()


def check_entries(folder: Path, *, within: Path | None = None) -> None:
    """Raise UnreadableFileError if `open_regular` would refuse a file of a folder.

    Folders below are not read. For a library that opens some of the files by itself.
    """
    try:
        entries = sorted(folder.iterdir())
        for entry in entries:
            # A broken link is a missing file to every reader.
            if entry.exists() and not entry.is_dir():
                _check(entry, entry.stat().st_mode, within)
    except UnreadableFileError:
        raise
    except OSError as error:
        _refuse(folder, error)


def read_bounded(path: Path, *, max_bytes: int, within: Path | None = None) -> bytes:
    """Read a file with `open_regular`. Raises UnreadableFileError also if it is too long."""
    with open_regular(path, within=within) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            _refuse(path, error)
    if len(data) > max_bytes:
        size = max(path.stat().st_size, len(data))
        sentence = f"{path} holds {size} bytes; expected at most {max_bytes}"
        raise UnreadableFileError(sentence, key="file.too_large")
    return data


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES, within: Path | None = None) -> Any:
    """Read a JSON file. Raises the errors of `read_bounded` and `parse_json`."""
    return parse_json(read_bounded(path, max_bytes=max_bytes, within=within))


def read_published(path: Path) -> Any:
    """Return the JSON value of a file that a program on another node writes; None before it exists.

    Raises the errors of `read_json`.
    """
    # List the folder: NFS may cache a missing file for half a minute, but revalidates a folder that
    # is opened.
    if not path.parent.is_dir() or path.name not in os.listdir(path.parent):
        return None
    return read_json(path, within=path.parent)


def parse_json(text: str | bytes, *, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: it is not JSON, is nested deeper than `max_depth`, or has an integer of too many
            digits to compute with.
    """
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    too_deep = f"nested more than {max_depth} levels deep"
    # The hook costs a call per integer. Responses may hold long numbers as text.
    parse_int = _bounded_int if _LONG_NUMBER.search(decoded) else None
    try:
        value = json.loads(decoded, parse_int=parse_int)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if decoded.count("[") + decoded.count("{") > max_depth and _depth_exceeds(value, max_depth):
        raise ValueError(too_deep)
    return value


def parse_yaml(
    text: str,
    *,
    max_depth: int = MAX_YAML_DEPTH,
    max_values: int = MAX_YAML_VALUES,
    loader: Any = None,
) -> Any:
    """Parse YAML within bounds.

    Args:
        max_depth: levels of keys and lists.
        max_values: keys, values and lists in total.
        loader: one of PyYAML's safe loaders; by default `config_loader`.

    Raises:
        ValueError: it is not YAML, or `yaml_fault` finds a fault in it. The message is one line.
    """
    import yaml  # not installed on a bare GPU machine, where a benchmark imports this module

    try:
        fault = yaml_fault(text, max_depth=max_depth, max_values=max_values)
        if fault is None:
            return yaml.load(text, Loader=loader or config_loader())
    except (yaml.YAMLError, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())[:_SHOWN]}") from error
    line, reason = fault
    raise ValueError(f"line {line}: {reason}")


@functools.cache
def config_loader() -> Any:
    """Return a safe loader that reads as OmegaConf does.

    1e-5 is a number, a date is a text, and no key comes twice.
    """
    import yaml  # not installed on a bare GPU machine, where a benchmark imports this module

    class ConfigLoader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set()
            for key, _ in node.value:
                if key.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                    continue
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        "while constructing a mapping",
                        node.start_mark,
                        f"found duplicate key {key.value}",
                        key.start_mark,
                    )
                keys.add(key.value)
            return super().construct_mapping(node, deep=deep)

    first_letters = list("-+0123456789.")
    ConfigLoader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, first_letters)
    resolvers = {}
    for first, rules in ConfigLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [rule for rule in rules if rule[0] != "tag:yaml.org,2002:timestamp"]
    ConfigLoader.yaml_implicit_resolvers = resolvers
    return ConfigLoader


def yaml_fault(text: str, *, max_depth: int, max_values: int) -> tuple[int, str] | None:
    """Return the line and the fault of YAML that could become large or deep; None without a fault.

    An alias can make a small text large without bound, a tag creates objects or fails in ways of
    its own, and libraries take quadratic time for long numbers and for many directives. Raises
    yaml.YAMLError if the text is not YAML.
    """
    import yaml  # not installed on a bare GPU machine, where a benchmark imports this module

    directive = _directive_line(text, max_depth) if _YAML_DIRECTIVE.search(text) else 0
    if directive:
        return directive, "a directive (%); expected keys and values only"
    depth = 0
    values = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return line, f"an alias (*{event.anchor[:_SHOWN]}); expected values"
        tag = getattr(event, "tag", None)
        if tag is not None:
            return line, f"a tag ({tag[:_SHOWN]}); expected a value without one"
        is_start = isinstance(event, yaml.CollectionStartEvent)
        depth += is_start - isinstance(event, yaml.CollectionEndEvent)
        if depth > max_depth:
            return line, f"more than {max_depth} levels of keys and lists"
        is_scalar = isinstance(event, yaml.ScalarEvent)
        values += is_start or is_scalar
        if values > max_values:
            return line, f"more than {max_values} keys and values"
        if not isinstance(event, yaml.ScalarEvent) or event.style:  # not a value, or quoted
            continue
        if len(event.value) > _MAX_DIGITS and _YAML_NUMBER.fullmatch(event.value):
            expected = f"expected at most {_MAX_DIGITS}, or quotes around a text"
            return line, f"a number of {len(event.value)} characters; {expected}"
    return None


def _directive_line(text: str, max_depth: int) -> int:
    """Return the line of the first directive; 0 if `yaml_fault` need not look for it."""
    import yaml  # not installed on a bare GPU machine, where a benchmark imports this module

    starts = (
        yaml.BlockMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.FlowSequenceStartToken,
    )
    ends = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
    depth = 0
    for token in yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(token, yaml.DirectiveToken):
            return token.start_mark.line + 1
        depth += isinstance(token, starts) - isinstance(token, ends)
        # The time per token grows with the depth.
        if depth > max_depth:
            return 0
    return 0


def link_root(folder: Path) -> Path:
    """Return the folder that the links in a model's folder may not leave.

    This is the folder itself. In the Hugging Face cache, whose snapshots are links to ../../blobs,
    it is the cache folder of the model.
    """
    snapshots = folder.resolve().parent
    is_cache = snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir()
    return snapshots.parent if is_cache else folder


def read_model_json(path: Path) -> Any:
    """Read a JSON file of a model's folder. Raises OSError or ValueError."""
    return read_json(path, within=link_root(path.parent))


def check_model_files(folder: Path) -> None:
    """Raise UnreadableFileError for a file that is not regular or a link that leaves the folder."""
    for part in (folder, folder / "additional_chat_templates"):
        if part.is_dir():
            check_entries(part, within=link_root(folder))


def _bounded_int(digits: str) -> int:
    count = len(digits.removeprefix("-"))
    if count > _MAX_DIGITS:
        raise ValueError(f"an integer of {count} digits; expected at most {_MAX_DIGITS}")
    return int(digits)


def _depth_exceeds(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterator[Any]:
    """Yield the lists and objects directly inside a list or an object."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (child for child in inner if isinstance(child, dict | list))


def _check(path: Path, mode: int, within: Path | None) -> None:
    if within is not None:
        _check_inside(path, path.resolve(), within)
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        if path.is_symlink():
            kind = f"a link to {path.resolve()}, {kind}"
        sentence = f"{path} is {kind}; expected a regular file"
        raise UnreadableFileError(sentence, key="file.not_regular")


def leads_out(path: Path, folder: Path) -> bool:
    """Tell whether a path lies outside of a folder once links are followed."""
    return not path.resolve().is_relative_to(folder.resolve())


def check_folder(path: Path) -> None:
    """Raise UnreadableFileError if a folder is a link that leads out of its parent folder."""
    if leads_out(path, path.parent):
        raise UnreadableFileError(
            f"{path} is a link to {path.resolve()}, outside of {path.parent}; expected a folder of "
            "its own. If you trust it, give the folder itself",
            key="folder.link.leads_out",
        )


def _check_inside(path: Path, target: Path, within: Path) -> None:
    if not target.is_relative_to(within.resolve()):
        raise UnreadableFileError(
            f"{path} is a link to {target}, outside of {within}; expected a file of this folder. "
            "If you trust it, replace the link by the file itself",
            key="file.link.leads_out",
        )


def _refuse(path: Path, error: Exception) -> NoReturn:
    if getattr(error, "errno", None) == errno.ENXIO:
        sentence = f"{path} is a socket or a fifo; expected a regular file"
        raise UnreadableFileError(sentence, key="file.not_regular") from error
    reason = getattr(error, "strerror", None) or str(error)
    raise UnreadableFileError(
        f"{path} cannot be read: {reason}; expected a regular file that you may read",
        key="file.not_readable",
    ) from error
