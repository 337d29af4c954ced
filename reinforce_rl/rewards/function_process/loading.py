"""Loads a reward function by its dotted name and checks its kwargs, with helpful messages."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from reinforce_rl.utils.choices import PROVIDED, PROVIDED_NAMES

F = TypeVar("F", bound=Callable[..., float])


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function and its kwargs."""

    key: str  # configuration key, for messages
    name: str  # dotted, `package.module.function`
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of each call, besides the sample


def checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Attach a check of a function's kwargs, run when a pool starts; it raises ValueError if they cannot work."""

    def mark(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark


class LoadFault(Exception):
    """A function cannot be used; the message is one sentence."""


def load_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Return the function with its kwargs bound; raise LoadFault if it cannot be loaded or they do not fit."""
    function = _find(spec)
    _check_kwargs(function, spec)
    return partial(function, **spec.kwargs)


def source_sha256(function: Callable[..., Any]) -> str | None:
    """Return the SHA-256 of the file that defines a function; None if there is none."""
    target = function.func if isinstance(function, partial) else function
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


def _find(spec: FunctionSpec) -> Callable[..., Any]:
    module_name, _, attribute = spec.name.rpartition(".")
    if not module_name:
        close = difflib.get_close_matches(spec.name, PROVIDED_NAMES, n=1)
        hint = f"; did you mean {PROVIDED}.{close[0]}?" if close else ""
        raise LoadFault(f"{spec.key}.name is {spec.name!r}; expected a dotted name, such as {PROVIDED}.gsm8k{hint}")
    module = _import(spec, module_name)
    function = getattr(module, attribute, None)
    if function is None:
        functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
        own = [name for name, f in functions.items() if f.__module__ == module_name and not name.startswith("_")]
        raise LoadFault(
            f"{spec.key}.name is {spec.name!r}, but {module_name} has no '{attribute}'; "
            f"{_advice(attribute, own, module_name)}"
        )
    if not callable(function):
        raise LoadFault(f"{spec.key}.name is {spec.name!r}, which is no function")
    return function


def _import(spec: FunctionSpec, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise LoadFault(
                f"{spec.key}.name is {spec.name!r}, but {module_name} imports '{missing}', which is not installed"
            ) from error
        raise LoadFault(
            f"{spec.key}.name is {spec.name!r}, but there is no module '{missing}'; {_module_advice(missing, spec)}"
        ) from error
    except BaseException as error:  # a user's file may raise anything, SystemExit included
        raise LoadFault(
            f"{spec.key}.name is {spec.name!r}, but the import of {module_name} raised {type(error).__name__}: {error}"
        ) from error


def _module_advice(missing: str, spec: FunctionSpec) -> str:
    parent, _, last = missing.rpartition(".")
    if parent:
        package = importlib.import_module(parent)
        names = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", []))]
        return _advice(last, names, parent)
    here = "its file belongs into the folder where you start, or onto PYTHONPATH"
    close = difflib.get_close_matches(spec.name.rpartition(".")[2], PROVIDED_NAMES, n=1)
    return f"{here}; did you mean {PROVIDED}.{close[0]}?" if close else here


def _advice(wanted: str, known: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(wanted, known, n=3)
    if close:
        return "did you mean " + " or ".join(f"{prefix}.{name}" for name in close) + "?"
    return f"it has {', '.join(sorted(known)) or 'none at all'}"


def _check_kwargs(function: Callable[..., Any], spec: FunctionSpec) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some builtins
        return
    try:
        signature.bind("", "", {}, **spec.kwargs)
    except TypeError as error:
        raise LoadFault(_kwargs_fault(signature, spec, error)) from error
    check = getattr(function, "check", None)
    if check is None:
        return
    try:
        check(**spec.kwargs)
    except ValueError as error:
        raise LoadFault(f"{spec.key}.kwargs of {spec.name}: {error}") from error
    except TypeError as error:
        raise LoadFault(f"{spec.key}.kwargs of {spec.name} has a value of a wrong type: {error}") from error


def _kwargs_fault(signature: inspect.Signature, spec: FunctionSpec, error: TypeError) -> str:
    parameters = list(signature.parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    own = [p for p in parameters if p.name not in positional[:3] and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in own]
    unknown = [name for name in spec.kwargs if name not in names]
    missing = [p.name for p in own if p.default is p.empty and p.name not in spec.kwargs]
    faults = []
    for name in unknown:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names) or 'none'}"
        faults.append(f"it has no argument '{name}'; {hint}")
    if missing:
        faults.append(f"{', '.join(missing)} must be given, as +{spec.key}.kwargs.{missing[0]}=VALUE")
    if not faults:
        faults.append(f"it is not called as (prompt, response, record, **kwargs): {error}")
    return f"{spec.key}.kwargs do not fit {spec.name}{signature}: {'; '.join(faults)}"
