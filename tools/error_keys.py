"""List the stable keys of the package's errors, with class and sentence.

python tools/error_keys.py --write    writes tests/error_sentences.txt
python tools/error_keys.py --check    exits with 1 if the file is stale, or an error has no key

A sentence is the text in the source, with `{...}` for a value. Whoever rewords an error runs
--write, and the file's diff shows what users will read. A key has at least two parts, such as
`data.line.not_json`; the first is the folder of the package, or the area that users know.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "reinforce_rl"
SENTENCES = ROOT / "tests" / "error_sentences.txt"
KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
# Errors that are raised with a sentence, and so with a key. ConfigError lists faults, which have
# the keys.
KINDS = frozenset(
    {
        "CheckpointError",
        "DataError",
        "DeepFault",
        "DiskError",
        "DivergedError",
        "EngineLostError",
        "Fault",
        "GenerationError",
        "LoadFault",
        "LostRankError",
        "ModelStuckError",
        "RankLostError",
        "ReinforceError",
        "RewardServerError",
        "AlertStop",
        "StoppedEarly",
        "TooManyFailedRewardsError",
        "UnreadableFileError",
        "WrongForm",
    }
)
# Makes the fault of settings that do not fit together; it prints their names and values itself.
FAULT_OF_SETTINGS = "settings_fault"
KEY_OF = "key_of"  # with a second argument: the key of an error that has none


@dataclass(frozen=True)
class RaisedError:
    """A call in the source that makes an error."""

    place: str  # FILE:LINE
    kind: str  # name of its class; decides the exit code
    key: str  # empty: none is given
    is_computed: bool  # the key is an expression, such as that of an error which is raised again
    sentence: str


def error_calls(source: str, name: str) -> Iterator[RaisedError]:
    """Yield the calls in a file's text that make an error; `name` is the file's."""
    tree = ast.parse(source)
    assigned = _assigned_before_calls(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _of_own_class(node, name)
        if not isinstance(node, ast.Call):
            continue
        if _called_name(node.func) == "ConfigError":
            yield from _faults_without_keys(node, name)
        if _called_name(node.func) in KINDS:
            sentence = node.args[0] if node.args else ast.Constant("")
            yield _error_of(node, name, _template(assigned.get(node, sentence)))
        if _called_name(node.func) == FAULT_OF_SETTINGS:
            fault = _error_of(node, name, _template_of_settings(node))
            yield replace(fault, kind="Fault")


def _of_own_class(definition: ast.ClassDef, name: str) -> Iterator[RaisedError]:
    """Yield the error of a class that calls `super().__init__(sentence, key=...)`."""
    for call in ast.walk(definition):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"):
            continue
        if call.args and _key_argument(call) is not None:
            error = _error_of(call, name, _template(call.args[0]))
            yield replace(error, kind=definition.name)


def _error_of(call: ast.Call, name: str, sentence: str) -> RaisedError:
    key = _key_argument(call)
    if isinstance(key, ast.Call) and _called_name(key.func) == KEY_OF and len(key.args) == 2:
        key = key.args[1]  # of errors that have none
    is_text = isinstance(key, ast.Constant)
    return RaisedError(
        place=f"{name}:{call.lineno}",
        kind=_called_name(call.func),
        key=str(key.value) if is_text else "",
        is_computed=key is not None and not is_text,
        sentence=sentence,
    )


def _template_of_settings(call: ast.Call) -> str:
    """Return the sentence of `settings_fault(cfg, settings, advice)`.

    It is "SETTING is {value} and SETTING is {value}; advice".
    """
    settings = call.args[1]
    names = settings.elts if isinstance(settings, ast.Tuple) else [settings]
    values = [f"{_template(name)} is {{value}}" for name in names]
    sentence = " and ".join(values)
    advice = _template(call.args[2])
    return f"{sentence}; {advice}"


def _assigned_before_calls(tree: ast.AST) -> dict[ast.Call, ast.expr]:
    """For each call whose first argument is a local variable, return its last assigned value."""
    assigned: dict[ast.Call, ast.expr] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        assignments.sort(key=lambda assignment: assignment.lineno)
        for call in nodes:
            if not isinstance(call, ast.Call) or not call.args:
                continue
            argument = call.args[0]
            if not isinstance(argument, ast.Name):
                continue
            variable = argument.id
            for assignment in assignments:
                target = assignment.targets[0]
                is_its = isinstance(target, ast.Name) and target.id == variable
                if is_its and assignment.lineno < call.lineno:
                    assigned[call] = assignment.value
    return assigned


def _faults_without_keys(call: ast.Call, name: str) -> Iterator[RaisedError]:
    """Yield the texts in a list of faults that are not a `Fault`."""
    for faults in call.args:
        for fault in faults.elts if isinstance(faults, ast.List) else ():
            if isinstance(fault, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield RaisedError(
                    place=f"{name}:{fault.lineno}",
                    kind="ConfigError",
                    key="",
                    is_computed=False,
                    sentence=_template(fault),
                )


def _called_name(function: ast.expr) -> str:
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return function.attr
    return ""


def _key_argument(call: ast.Call) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == "key":
            return keyword.value
    return None


def _template(sentence: ast.expr) -> str:
    """Return a sentence as it stands in the source, with `{...}` for each value."""
    if isinstance(sentence, ast.Constant):
        return str(sentence.value)
    if isinstance(sentence, ast.JoinedStr):
        return "".join(map(_template, sentence.values))
    if isinstance(sentence, ast.FormattedValue):
        return "{" + ast.unparse(sentence.value) + "}"
    if isinstance(sentence, ast.BinOp) and isinstance(sentence.op, ast.Add):
        return _template(sentence.left) + _template(sentence.right)
    return "{" + ast.unparse(sentence) + "}"


def package_errors() -> list[RaisedError]:
    """Return the errors that the package makes."""
    errors: list[RaisedError] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        errors.extend(error_calls(source, name))
    return errors


def listing(errors: list[RaisedError]) -> str:
    """Return the text of tests/error_sentences.txt: a line for each key, class and sentence."""
    lines = set()
    for error in errors:
        if error.key:
            sentence = error.sentence.replace("\n", "\\n")
            lines.add(f"{error.key}\t{error.kind}\t{sentence}\n")
    return "".join(sorted(lines))


def faults_of(errors: list[RaisedError]) -> list[str]:
    """Return a sentence for each error without a key, or with one that is not of the form."""
    faults = []
    for error in errors:
        if error.is_computed:
            continue
        if not error.key:
            faults.append(f"{error.place}: has no key")
        elif not KEY.fullmatch(error.key):
            faults.append(f"{error.place}: the key {error.key!r} is not of the form area.kind")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write tests/error_sentences.txt")
    action.add_argument("--check", action="store_true", help="exit with 1 if it is not today's")
    arguments = parser.parse_args()
    errors = package_errors()
    if arguments.write:
        SENTENCES.write_text(listing(errors), encoding="utf-8")
        return 0
    faults = faults_of(errors)
    if SENTENCES.read_text(encoding="utf-8") != listing(errors):
        faults.append(
            "tests/error_sentences.txt is not today's: run python tools/error_keys.py --write"
        )
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
