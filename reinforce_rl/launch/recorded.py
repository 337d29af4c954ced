"""Commands about the records of a run. Each command does its own imports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.launch.terminal import errors_exit, print_error, start_ranks
from reinforce_rl.utils.files import output_faults

Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="use functions, addresses and the like that only the run's folder names"
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="the run's folder")]


def records(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="default: the last one recorded")] = None,
    kind: Annotated[
        Literal["rollouts", "validation", "test"], typer.Option(help="which samples")
    ] = "rollouts",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="with the ids, texts and values of each token")
    ] = False,
) -> None:
    """Print a step's samples as JSON, one a line: prompt, response, rewards, KL, advantage, ..."""
    from reinforce_rl.monitoring.run_folder import open_run

    for line in open_run(run).sample_lines(step, kind, tokens=tokens):
        print(line, end="")


def _check(**files: Path | None) -> None:
    """Raise ConfigError, before the work, if the file of an option cannot be written."""
    named = {f"--{option}": path for option, path in files.items() if path is not None}
    if faults := [fault for option, path in named.items() for fault in output_faults(option, path)]:
        raise ConfigError(faults)


def replay(
    run: RunFolder,
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of `train`")] = None,
    step: Annotated[
        str | None,
        typer.Option(help="such as 12, or 10:20 with KEY=VALUE (default: the last one recorded)"),
    ] = None,
    phase: Annotated[
        Literal["generate", "score", "logprobs", "advantages", "update", "all"],
        typer.Option(help="what to make again"),
    ] = "all",
    reward: Annotated[
        str | None,
        typer.Option(
            help=(
                "stored, restart, my_rewards.f or http://HOST:PORT; docs/debugging.md#replay-a-step"
            )
        ),
    ] = None,
    trust: Trust = False,
    json: Annotated[Path | None, typer.Option(help="JSON file for all results")] = None,
    html: Annotated[
        Path | None, typer.Option(help="with KEY=VALUE: file for the run's page with plots")
    ] = None,
) -> None:
    """Make a recorded step again, and name the first phase, prompt, token or tensor that differs.

    With KEY=VALUE of KL, baseline, credit, shaping, rewards or the loss, the stored rollouts are
    given these settings beside the run's own, without a GPU, and what changes is shown.

    Exit code 0: nothing differs, or the settings were compared; 1: something differs; 2: nothing
    does, but not every phase could be made again, or an error.
    """
    from reinforce_rl.debugging.recompute import is_recomputed, recompute, write_page
    from reinforce_rl.debugging.replay import replay, step_number
    from reinforce_rl.utils.console import table_console
    from reinforce_rl.utils.files import write_json

    given = overrides or []
    with errors_exit(2):
        _check(json=json, html=html)
        # --reward always repeats a step.
        if is_recomputed(run, step, given if reward is None else []):
            _refuse(
                "--reward",
                reward,
                "several steps are computed from stored rollouts; name the source as "
                "reward=function reward_function.name=NAME",
            )
            result = recompute(run, step, given, phase=phase, trust=trust, say=print_error)
            if html is not None:
                write_page(result, run, html)
        else:
            _refuse("--html", html, "its plots show what KEY=VALUE changes on stored rollouts")
            result = replay(
                run,
                step_number(step),
                phase=phase,
                reward=reward,
                overrides=given,
                trust=trust,
                start=start_ranks,
                say=lambda text: print(text, flush=True),
            )
    if not result.is_empty:  # only the first rank has it
        table_console().print(result.table())
        if json is not None:
            write_json(json, result.as_json())
    raise typer.Exit(result.exit_code)


def _refuse(option: str, value: object, advice: str) -> None:
    """Raise ConfigError if an option is given that has no effect in this mode."""
    if value is not None:
        sentence = f"{option} is {value}, which has no effect here; leave it out: {advice}"
        raise ConfigError([Fault(sentence, key="replay.option.without_effect")])


def diff(
    first: Annotated[Path, typer.Argument(help="a run's folder")],
    second: Annotated[Path, typer.Argument(help="another run's")],
    json: Annotated[Path | None, typer.Option(help="JSON file for all results")] = None,
    html: Annotated[
        Path | None, typer.Option(help="file for a page that overlays the curves")
    ] = None,
) -> None:
    """Find where two runs part: the first setting, step, phase, prompt and token that differ.

    Exit code 0: all steps that both have are the same bit for bit; 1: they part; 2: they do not
    part, as far as they were recorded, or an error.
    """
    from reinforce_rl.debugging.diff import diff, write
    from reinforce_rl.utils.console import table_console

    with errors_exit(2):
        _check(json=json, html=html)
        differences = diff(first, second)
    table_console().print(differences.table())
    write(differences, first, second, json, html)
    raise typer.Exit(differences.exit_code)
