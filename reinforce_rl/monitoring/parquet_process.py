"""Read untrusted Parquet in child processes: on some damaged files Arrow ends the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import DataError, Fault, key_of
from reinforce_rl.monitoring.parquet_bounds import NOT_PARQUET, read_bounded_file
from reinforce_rl.utils.process import (
    KILL_SECONDS,
    ModuleChild,
    connect_to_parent,
    limit_memory,
    receive,
    send,
)

if TYPE_CHECKING:
    import pyarrow as pa

READ_SECONDS = 120  # for one file
_MEMORY_SHARE = 0.25  # of the machine's memory; the limit of a reader
_KEPT = 4  # readers that wait for the next file
_MAX_FAULT = 500  # characters of Arrow's message, as it may repeat the file

_waiting: list[ModuleChild] = []
os.register_at_fork(after_in_child=_waiting.clear)  # a fork shares the connections


def read_in_child(path: str | Path, columns: Sequence[str] | None, filters: Any) -> pa.Table:
    """Read a file by `read_bounded_file` in a child process.

    Raises DataError also if that process dies, or has not read the file in `READ_SECONDS`.
    """
    import pyarrow as pa

    reader = _take()
    # A reader with a pending answer must not get the next question.
    is_free = False
    try:
        question = {
            "path": str(Path(path).absolute()),  # a reader keeps the working folder of its start
            "shown": str(path),
            "columns": columns,
            "filters": filters,
            "seconds": READ_SECONDS,
        }
        send(reader.connection, question)
        answer = receive(reader.connection)
        if answer is None:
            raise EOFError
        data = b"" if answer["fault"] else reader.connection.recv_bytes()
        is_free = True
    except (EOFError, OSError) as error:
        why = _why_it_ended(reader)
        raise DataError(NOT_PARQUET.format(why), key=why.key) from error
    finally:
        if is_free and len(_waiting) < _KEPT:
            _waiting.append(reader)
        else:
            _end(reader)
    if answer["fault"]:
        raise DataError(answer["fault"], key=answer["key"])
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def _take() -> ModuleChild:
    """Return a reader that is not in use."""
    while _waiting:
        with contextlib.suppress(IndexError):  # another thread took the last one
            reader = _waiting.pop()
            if reader.exit_code is None:
                return reader
            _end(reader)
    reader = ModuleChild(
        "reinforce_rl.monitoring.parquet_process",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(reader.kill)
    return reader


def _end(reader: ModuleChild) -> None:
    reader.kill()
    reader.connection.close()
    atexit.unregister(reader.kill)


def _why_it_ended(reader: ModuleChild) -> Fault:
    """Return the reason of a reader's end."""
    code = reader.wait(KILL_SECONDS)
    if code == -signal.SIGALRM:
        return Fault(f"it was not read in {READ_SECONDS} s", key="parquet.file.takes_too_long")
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return Fault(f"its reader was ended by {name}", key="parquet.file.ended_its_reader")
    return Fault(f"its reader ended with exit code {code}", key="parquet.file.ended_its_reader")


def main() -> None:
    """Read the files that the parent names, until it closes the connection."""
    # The end of the connection ends this process, not the end of the thread that started it.
    connection = connect_to_parent(death_signal=None)
    import pyarrow.parquet  # noqa: F401  # not counted in the time of a file

    limit_memory(_MEMORY_SHARE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (message := receive(connection)) is not None:
        # SIGALRM ends this process even inside of Arrow.
        signal.alarm(message["seconds"])
        data, fault = _read(message)
        signal.alarm(0)
        send(connection, {"fault": fault, "key": key_of(fault)})
        if not fault:
            with contextlib.suppress(OSError):
                connection.send_bytes(data)
        del data


def _read(message: dict[str, Any]) -> tuple[Any, str]:
    """Return a table as Arrow's stream, or the reason of a failure."""
    import pyarrow as pa

    # Arrow takes a tuple as a condition and a list as several. JSON has no tuples.
    filters = message["filters"] and [tuple(condition) for condition in message["filters"]]
    try:
        table = read_bounded_file(message["path"], message["columns"], filters)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue(), ""
    except DataError as error:
        sentence = str(error).replace(message["path"], message["shown"])
        return b"", Fault(sentence[:_MAX_FAULT], key=error.key)
    except MemoryError:
        sentence = NOT_PARQUET.format("it needs more memory than a reader may take")
        return b"", Fault(sentence, key="parquet.file.needs_too_much_memory")
    except Exception as error:
        sentence = NOT_PARQUET.format(f"{type(error).__name__}: {error}"[:_MAX_FAULT])
        return b"", Fault(sentence, key="parquet.file.not_readable")


if __name__ == "__main__":
    main()
