"""Commands about what a run has recorded; each imports what it needs by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.terminal import errors_exit, print_error, start_ranks
from reinforce_rl.utils.files import output_faults

Trust = Annotated[
    bool, typer.Option("--trust", help="use functions, addresses and the like that only the run's folder names")
]
RunFolder = Annotated[Path, typer.Argument(help="the run's folder")]


def records(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="default: the last one recorded")] = None,
    kind: Annotated[Literal["rollouts", "validation", "test"], typer.Option(help="which samples")] = "rollouts",
    tokens: Annotated[bool, typer.Option("--tokens", help="with the ids, texts and values of each token")] = False,
) -> None:
    """Print a step's samples as JSON, one a line: prompt, response, rewards, KL, advantage, ..."""
    from reinforce_rl.monitoring.run_folder import open_run

    for line in open_run(run).sample_lines(step, kind, tokens=tokens):
        print(line, end="")


def _check(**files: Path | None) -> None:
    """Raise ConfigError, before the work, if a file that an option names cannot be written."""
    named = {f"--{option}": path for option, path in files.items() if path is not None}
    if faults := [fault for option, path in named.items() for fault in output_faults(option, path)]:
        raise ConfigError(faults)


def whatif(
    run: RunFolder,
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of `train`")] = None,
    steps: Annotated[str | None, typer.Option(help="such as 12 or 10:20 (default: the last one recorded)")] = None,
    gradient: Annotated[bool, typer.Option("--gradient", help="compare the gradients on a checkpoint, too")] = False,
    trust: Trust = False,
    json: Annotated[Path | None, typer.Option(help="file for all numbers, of each sample too")] = None,
    html: Annotated[Path | None, typer.Option(help="file for the run's page with plots of them")] = None,
) -> None:
    """Recompute the advantages of recorded steps under other settings or rewards, without a GPU, and compare them."""
    from reinforce_rl.debugging.whatif import whatif, write
    from reinforce_rl.utils.console import table_console

    _check(json=json, html=html)
    found = whatif(run, steps, overrides or (), gradient=gradient, trust=trust, say=print_error)
    table_console().print(found.table())
    write(found, run, json, html)


def replay(
    run: RunFolder,
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of `train`")] = None,
    step: Annotated[int | None, typer.Option(help="default: the last one recorded")] = None,
    phase: Annotated[
        Literal["generate", "score", "logprobs", "advantages", "update", "all"],
        typer.Option(help="what to make again"),
    ] = "all",
    reward: Annotated[
        str | None, typer.Option(help="stored, restart, my_rewards.f or http://HOST:PORT; docs/debugging.md#replay")
    ] = None,
    trust: Trust = False,
    json: Annotated[Path | None, typer.Option(help="file for all that was found")] = None,
) -> None:
    """Make a recorded step again, and name the first phase, prompt, token or tensor that differs.

    Exit code 0: nothing differs; 1: something does; 2: nothing does, but not every phase could be made again, or an
    error.
    """
    from reinforce_rl.debugging.replay import replay
    from reinforce_rl.utils.console import table_console
    from reinforce_rl.utils.files import write_json

    options = {"phase": phase, "reward": reward, "overrides": overrides or (), "trust": trust}
    with errors_exit(2):
        _check(json=json)
        found = replay(run, step, say=lambda text: print(text, flush=True), start=start_ranks, **options)
    if found.phases:  # not on the other ranks
        table_console().print(found.table())
        if json is not None:
            write_json(json, found.as_json())
    raise typer.Exit(found.exit_code)


def diff(
    first: Annotated[Path, typer.Argument(help="a run's folder")],
    second: Annotated[Path, typer.Argument(help="another run's")],
    json: Annotated[Path | None, typer.Option(help="file for all that was found")] = None,
    html: Annotated[Path | None, typer.Option(help="file for a page that overlays the curves")] = None,
) -> None:
    """Find where two runs part: the first setting, step, phase, prompt and token that differ.

    Exit code 0: all steps that both have are the same bit for bit; 1: they part; 2: they do not part, as far as they
    were recorded, or an error.
    """
    from reinforce_rl.debugging.diff import diff, write
    from reinforce_rl.utils.console import table_console

    with errors_exit(2):
        _check(json=json, html=html)
        found = diff(first, second)
    table_console().print(found.table())
    write(found, first, second, json, html)
    raise typer.Exit(found.exit_code)
