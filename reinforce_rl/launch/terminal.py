"""Between a program and who typed it: what it was called, its ranks, and how it ends.

What a person can mend ends in a line on standard error and an exit code, without a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED, DiskError, LostRankError, ReinforceError
from reinforce_rl.utils.control_characters import shown_streams
from reinforce_rl.utils.files import UNWRITABLE, write_fault
from reinforce_rl.utils.job_rank import is_first_rank, ranks_started
from reinforce_rl.utils.process import PACKAGE_PARENT, RUN_MODULE

_command = ""  # "train" in `reinforce-rl train`; empty in a script


def become(command: str, arguments: Sequence[str]) -> None:
    """Let this be `reinforce-rl COMMAND`: to Hydra, to the ranks that it starts, and in messages."""
    global _command
    _command = command
    sys.argv = [f"reinforce-rl {command}", *arguments]


def program_name() -> str:
    """What a person types before the arguments."""
    return sys.argv[0] if _command else f"python {sys.argv[0]}"


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has another encoding, such as ASCII.

    Files, their names and what is printed are UTF-8. Python's own calls can be told so one by one; pyarrow, tokenizers
    and Hydra cannot.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def start_ranks(devices: int, num_nodes: int, key: str = "trainer.num_nodes") -> None:
    """Replace a plain `python` process by torchrun (`utils/ranks.py`) if there are several ranks; not under torchrun.

    `key` is the config key of `num_nodes`, for the ReinforceError that several nodes raise.
    """
    if ranks_started() is not None or devices * num_nodes == 1:
        return
    if num_nodes > 1:
        expected = f"`torchrun --nnodes {num_nodes} --nproc-per-node {devices} ...`"
        raise ReinforceError(
            f"{key} is {num_nodes}, but this is plain python, which starts the ranks of one node; "
            f"start it on every node with {expected}",
            key="launch.ranks.several_nodes",
        )
    # One thread per rank: ranks that each use all cores slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # whatever file of the PATH was typed
    program = [RUN_MODULE, "reinforce_rl", _command] if _command else sys.argv[:1]
    launcher = [
        RUN_MODULE,
        "reinforce_rl.utils.ranks",
        "--standalone",
        "--nproc-per-node",
        str(devices),
    ]
    # The package need not be installed for the script to run, and the script's own folder is not on
    # the path.
    paths = [PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *program, *sys.argv[1:]])


def print_error(text: str) -> None:
    """Print on standard error, once where several ranks would."""
    if is_first_rank():
        print(text, file=sys.stderr, flush=True)


def fail(text: str, code: int = EXIT_ERROR) -> NoReturn:
    """Say why, on standard error, and end."""
    print(text if code == EXIT_STOPPED else f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(code)


@contextlib.contextmanager
def errors_exit(code: int) -> Iterator[None]:
    """Let an error of the block end the program with this code, where 1 is a finding."""
    try:
        yield
    except ReinforceError as error:
        error.exit_code = code
        raise


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with a message and a code where the block raises what is no defect; others pass.

    Control characters of what it prints are shown.
    """
    with shown_streams():
        try:
            yield
        except LostRankError as error:
            print(f"error: {error.with_keys()}", file=sys.stderr, flush=True)
            # a thread in a collective with the lost rank would abort Python's shutdown
            end_at_once(error.exit_code)
        except ReinforceError as error:
            fail(error.with_keys(), error.exit_code)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                # or Python fails once more when it flushes at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.exit(141)  # as a shell says of SIGPIPE
            if error.errno not in UNWRITABLE:
                raise
            fail(DiskError(write_fault(error), key="disk.file.not_written").with_keys())
        except MemoryError:
            fault = ReinforceError(
                "out of memory: a file may hold more than its size suggests, or the machine is full",
                key="memory.used_up",
            )
            fail(fault.with_keys())
        except KeyboardInterrupt as error:
            print(str(error) or "interrupted by Ctrl-C", flush=True)
            # a thread that is writing a checkpoint would abort while Python shuts down
            end_at_once(130)


def end_at_once(code: int) -> NoReturn:
    """Exit without Python's shutdown, in which other threads may abort the process."""
    atexit._run_exitfuncs()  # which os._exit would skip
    sys.stdout.flush()
    os._exit(code)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone, as `head` does."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
