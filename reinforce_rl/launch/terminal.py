"""The terminal side of a program: its name, its ranks, and its exit.

An error that the user can mend ends in a line on standard error and an exit code, without a
traceback.
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
    """Make this process `reinforce-rl COMMAND`: for Hydra, for ranks it starts, and in messages."""
    global _command
    _command = command
    sys.argv = [f"reinforce-rl {command}", *arguments]


def program_name() -> str:
    """Return what the user types before the arguments."""
    return sys.argv[0] if _command else f"python {sys.argv[0]}"


def use_utf8() -> None:
    """Restart this program in Python's UTF-8 mode if the locale has another encoding.

    Files, their names and output are UTF-8. Python's calls take an encoding; calls of pyarrow,
    tokenizers and Hydra do not.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def start_ranks(devices: int, num_nodes: int, key: str = "trainer.num_nodes") -> None:
    """Replace a plain `python` process by torchrun (`utils/ranks.py`) if there are several ranks.

    Does nothing under torchrun. Raises ReinforceError for several nodes; `key` is the config key of
    `num_nodes`.
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
    # The module, whichever file of the PATH the user has typed.
    program = [RUN_MODULE, "reinforce_rl", _command] if _command else sys.argv[:1]
    launcher = [
        RUN_MODULE,
        "reinforce_rl.utils.ranks",
        "--standalone",
        "--nproc-per-node",
        str(devices),
    ]
    # The package need not be installed for the script to run, and the script's folder is not on the
    # path of the ranks.
    paths = [PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *program, *sys.argv[1:]])


def print_error(text: str) -> None:
    """Print on standard error, on the first rank alone."""
    if is_first_rank():
        print(text, file=sys.stderr, flush=True)


def fail(text: str, code: int = EXIT_ERROR) -> NoReturn:
    """Print the reason on standard error, and exit."""
    print(text if code == EXIT_STOPPED else f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(code)


@contextlib.contextmanager
def errors_exit(code: int) -> Iterator[None]:
    """Make an error of the block end the program with this code; 1 stands for a finding."""
    try:
        yield
    except ReinforceError as error:
        error.exit_code = code
        raise


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with a message and a code if the block raises an error that is no defect.

    Other errors pass. Control characters in the block's output are shown.
    """
    with shown_streams():
        try:
            yield
        except LostRankError as error:
            print(f"error: {error.with_keys()}", file=sys.stderr, flush=True)
            # A thread in a collective with the lost rank would abort Python's shutdown.
            end_at_once(error.exit_code)
        except ReinforceError as error:
            fail(error.with_keys(), error.exit_code)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                # Otherwise Python fails once more when it flushes at its end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.exit(141)  # the shell's code for SIGPIPE
            if error.errno not in UNWRITABLE:
                raise
            fail(DiskError(write_fault(error), key="disk.file.not_written").with_keys())
        except MemoryError:
            fault = ReinforceError(
                "out of memory: a file may hold more than its size suggests, or the machine is "
                "full",
                key="memory.used_up",
            )
            fail(fault.with_keys())
        except KeyboardInterrupt as error:
            print(str(error) or "interrupted by Ctrl-C", flush=True)
            # A thread that is writing a checkpoint would abort Python's shutdown.
            end_at_once(130)


def end_at_once(code: int) -> NoReturn:
    """Exit without Python's shutdown, in which other threads may abort the process."""
    atexit._run_exitfuncs()  # os._exit skips them
    sys.stdout.flush()
    os._exit(code)


def _nobody_reads() -> bool:
    """Return True if standard output is a pipe whose reader, such as `head`, has gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
