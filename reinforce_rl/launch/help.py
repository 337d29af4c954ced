"""Print `--help` of a Hydra program: each key with sentence, type, bound and default."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple
from difflib import get_close_matches

from rich.table import Column, Table
from rich.text import Text

from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.describe import PROGRAMS, Key, keys_of
from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.terminal import program_name
from reinforce_rl.utils.console import Console

HEAD = """Usage: {program} [OPTION ...] KEY=VALUE ...

  --help [GROUP or WORD]       all keys, those of a group (--help model.optim), or those about
                               something (--help kl)
  --config-dir DIR --config-name NAME
                               DIR/NAME.yaml of your own, which begins with:
                               defaults: [{name}, _self_]
  --cfg job                    print the configuration, and start nothing
  -m                           a run for each combination of KEY=1,2 and OTHER=3,4, one
                               after the other
  --hydra-help                 Hydra's other options
"""


def show_help(name: str, words: Sequence[str], console: Console | None = None) -> None:
    """Print the keys of conf/NAME.yaml that match the words; all keys if there are no words.

    Raises ReinforceError if no key matches.
    """
    console = console or Console(highlight=False)
    keys = [
        Key(*(text.replace("`", "") for text in astuple(key))) for key in keys_of(PROGRAMS[name]())
    ]
    selected = _asked_for(keys, words)
    if not words:
        console.print(HEAD.format(program=program_name(), name=name), soft_wrap=True)
        if name == "train_reinforce_actor":
            presets = ", ".join(
                sorted(path.stem for path in (CONF_FOLDER / "algorithm").glob("*.yaml"))
            )
            console.print(f"algorithm=NAME sets many of them at once: {presets}\n", soft_wrap=True)
    if not console.is_terminal:
        for key in selected:
            default = key.default if key.default == "required" else f"default {key.default}"
            console.print(f"{key.path}  ({_kind(key)}; {default})  {key.meaning}", soft_wrap=True)
        return
    for group, members in itertools.groupby(selected, lambda key: key.path.rpartition(".")[0]):
        title = Text(group or "keys without a group", style="bold")
        columns = (
            Column(style="cyan", no_wrap=True),
            Column(max_width=24, overflow="fold"),
            Column(),
        )
        table = Table(*columns, title=title, title_justify="left", box=None, show_header=False)
        for key in members:
            meaning = Text.assemble(
                key.meaning, " " if key.meaning else "", (f"({_kind(key)})", "dim")
            )
            table.add_row(key.path.rpartition(".")[2], Text(key.default), meaning)
        console.print(table, "")


def _asked_for(keys: Sequence[Key], words: Sequence[str]) -> list[Key]:
    selected = [key for key in keys if all(f"{key.path}.".startswith(f"{word}.") for word in words)]
    if not selected:
        selected = [
            key
            for key in keys
            if all(word.lower() in f"{key.path} {key.meaning}".lower() for word in words)
        ]
    if not selected:
        parts = [key.path.split(".") for key in keys]
        names = {".".join(path[:end]) for path in parts for end in range(1, len(path) + 1)}.union(
            *parts
        )
        close = get_close_matches(" ".join(words), sorted(names), n=3)
        advice = (
            f"did you mean {' or '.join(close)}?" if close else "--help alone shows all of them"
        )
        raise ReinforceError(
            f"--help {' '.join(words)}: no key has this name or mentions it; {advice}",
            key="help.word.unknown",
        )
    return selected


def _kind(key: Key) -> str:
    return ", ".join(filter(None, [key.kind, key.unit, key.bound]))
