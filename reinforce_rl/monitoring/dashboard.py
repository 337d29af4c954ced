"""`reinforce-rl dashboard FOLDER`: a local page of the runs below a folder, kept up to date.

    GET /                           the page, with /dashboard.js, /dashboard.css and /plotly.js
    GET /api/runs                   {folder, runs: [{name, state, step, max_steps, time, reward}]}
    GET /api/run?name=N[&stamp=S]   `report.overview` and {stamp}; 204 for an unchanged stamp
    GET /api/samples?name=N&kind=K&step=I
                                    {rows: [...], total, columns}: columns of tokens, if recorded
    GET /api/tokens?name=N&kind=K&step=I&prompt=I
                                    {tokens: {"PROMPT SAMPLE": {column: [...]}}}
    GET /api/prompt?name=N&kind=K&prompt=I
                                    {rows: [...]}: samples of one prompt, by ascending step
    GET /api/tables?name=N&name=M[&...]
                                    {tables: [...]}: the comparison of runs

The answer to a fault is {error: text}. Requests have the names of /api/runs, and no paths.

Each run has a lock. While there is something to read, it also has a thread that reads in short
slices: an answer has everything that was read so far. A run that is slow or cannot be read delays
no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from reinforce_rl.errors import DataError, ReinforceError, key_of
from reinforce_rl.monitoring.columns import checked_line
from reinforce_rl.monitoring.compare import tables
from reinforce_rl.monitoring.loggers import METRICS_FILE
from reinforce_rl.monitoring.metrics_file import parse_line
from reinforce_rl.monitoring.records import Kind
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder, runs_below
from reinforce_rl.monitoring.view import MAX_ROWS, PAGE, plotly, render, token_values
from reinforce_rl.runtime.settings import HISTORY_FILE
from reinforce_rl.runtime.status import STATUS_FILE, run_status
from reinforce_rl.utils.files import plain_number
from reinforce_rl.utils.net import Address, listen
from reinforce_rl.utils.untrusted_files import leads_out, open_regular

_OPEN_RUNS = 32  # runs with metrics in memory
_OPEN_VALUES = 30_000_000  # values of all these runs, 12 bytes each
_RUN_VALUES = 20_000_000  # values of a run
_SLICE_SECONDS = 0.05  # a run's reader holds its lock this long
_WAIT_SECONDS = 0.3  # an answer waits this long for the reader
_ANSWER_SECONDS = 20.0
_PARALLEL = 16  # answers at a time
_SCAN_SECONDS = 1.0  # between searches for runs
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl; the list takes the last reward from them
_PROMPT_STEPS = 60  # step files that are searched for a prompt
_HEADERS = {
    # Plotly writes its styles into the document.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class DashboardRun:
    """A run with a reader thread; `opened` gives access to everything that was read."""

    def __init__(self, path: Path, within: Path):
        self._run = RunFolder(path, within=within, max_values=_RUN_VALUES)
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._fault: Exception | None = None

    @property
    def num_values(self) -> int:
        return self._run.metrics.num_values

    @contextlib.contextmanager
    def opened(self) -> Iterator[RunFolder]:
        """Wait briefly for new lines, and yield the run for exclusive use.

        Raises DataError if the run is not free in time, and also the errors of the reader.
        """
        with self._held():
            if self._reader is None:
                self._fault = None
                # All threads of the dashboard are daemons: a disk that hangs must not keep the
                # dashboard from ending.
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            reader = self._reader
        reader.join(_WAIT_SECONDS)
        with self._held():
            if self._fault is not None:
                raise self._fault
            yield self._run

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_ANSWER_SECONDS):
            raise DataError(
                f"{self._run.path} was not read within {_ANSWER_SECONDS:.0f} s; check that its "
                "disk is available",
                key="dashboard.run.takes_too_long",
            )
        try:
            yield
        finally:
            self._lock.release()

    def _read(self) -> None:
        try:
            for advance in (self._run.refresh, self._run.judge):
                is_done = False
                while not is_done:
                    with self._lock:
                        is_done = advance(_SLICE_SECONDS)
                    time.sleep(_SLICE_SECONDS / 10)  # another thread may take the lock
        except Exception as error:
            self._fault = error
        finally:
            with self._lock:
                self._reader = None


class Dashboard:
    """The aiohttp application; requests name `host`, localhost or an address as its host."""

    def __init__(self, folder: str | Path, host: str = "127.0.0.1"):
        self._folder = Path(folder)
        self._host = host
        if not self._folder.is_dir():
            raise DataError(
                f"{folder}: no such folder; expected the folder of a run, or a folder of several "
                "runs",
                key="dashboard.folder.missing",
            )
        self._scanned: tuple[float, dict[str, Path]] = (-math.inf, {})
        self._scanning = threading.Lock()
        self._open: OrderedDict[Path, DashboardRun] = OrderedDict()
        self._opening = threading.Lock()
        self._places = asyncio.Semaphore(_PARALLEL)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around])
        page: dict[str, tuple[str, Callable[[], str]]] = {
            "": ("html", render),
            "plotly.js": ("javascript", plotly),
            "dashboard.js": ("javascript", (PAGE / "dashboard.js").read_text),
            "dashboard.css": ("css", (PAGE / "dashboard.css").read_text),
        }
        for name, (kind, read) in page.items():
            app.router.add_get(
                f"/{name}", self._handler(f"text/{kind}", lambda _, read=read: read())
            )
        answers = {
            "runs": self._runs,
            "run": self._run,
            "samples": self._samples,
            "tokens": self._tokens,
        }
        for name, answer in {**answers, "prompt": self._prompt, "tables": self._tables}.items():
            app.router.add_get(f"/api/{name}", self._handler("application/json", answer))
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not self._is_ours(request.host):
                advice = (
                    "ask by localhost or an address, or start the dashboard with --host and that "
                    "name"
                )
                raise web.HTTPMisdirectedRequest(
                    text=f"this dashboard is not {request.host}; {advice}"
                )
            response = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.text}, status=error.status)
        except asyncio.TimeoutError:
            text = f"no answer within {_ANSWER_SECONDS:.0f} s; other runs are not affected"
            response = web.json_response({"error": text}, status=503)
        except Exception as error:
            # A file may hold anything, and a run may be deleted at any time.
            key = key_of(error)
            response = web.json_response({"error": _sentence(error), "key": key}, status=404)
        response.headers.update(_HEADERS)
        return response

    def _is_ours(self, host: str) -> bool:
        """Return False for a name that a foreign page may have pointed here (DNS rebinding)."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name.strip("[]")))
        return name.lower() in ("localhost", self._host.lower())

    def _handler(self, kind: str, answer: Callable[[web.Request], Any]) -> Handler:
        """Return a handler that answers with text, with values as JSON, or with 204 for None."""

        def encoded(request: web.Request) -> bytes | None:
            values = answer(request)
            # JSON in ASCII: texts of a run may hold lone surrogates.
            text = values if isinstance(values, str | None) else json.dumps(values, allow_nan=False)
            return text if text is None else text.encode()

        async def answered(request: web.Request) -> bytes | None:
            async with self._places:
                return await _in_thread(functools.partial(encoded, request))

        async def handle(request: web.Request) -> web.Response:
            body = await asyncio.wait_for(answered(request), _ANSWER_SECONDS)
            if body is None:
                return web.Response(status=204)
            response = web.Response(body=body, content_type=kind, charset="utf-8")
            response.enable_compression()
            return response

        return handle

    def _folders(self) -> dict[str, Path]:
        """Return the runs' folders by their names on the page."""
        with self._scanning:
            scanned, folders = self._scanned
            if time.monotonic() > scanned + _SCAN_SECONDS:
                root = self._folder
                folders = {}
                for path in runs_below(root):
                    name = (
                        path.relative_to(root).as_posix() if path != root else root.resolve().name
                    )
                    # Names need not be UTF-8.
                    name = os.fsencode(name).decode("utf-8", "backslashreplace")
                    while name in folders:
                        name += "'"
                    folders[name] = path
                self._scanned = (time.monotonic(), folders)
            return folders

    def _opened(self, name: str) -> DashboardRun:
        path = self._folders().get(name)
        if path is None:
            raise DataError(
                f"there is no run {name!r} below {self._folder}",
                key="dashboard.run.unknown",
            )
        self._check_inside(path)
        with self._opening:
            run = self._open.get(path) or DashboardRun(path, self._folder)
            self._open[path] = run
            self._open.move_to_end(path)
            others = list(self._open)[:-1]
            while others and (
                len(self._open) > _OPEN_RUNS
                or sum(run.num_values for run in self._open.values()) > _OPEN_VALUES
            ):
                del self._open[others.pop(0)]
            return run

    def _check_inside(self, path: Path) -> None:
        if leads_out(path, self._folder):
            advice = "start the dashboard on the folder that it leads to"
            raise DataError(
                f"{path} is a link to {path.resolve()}, outside of {self._folder}; {advice}",
                key="dashboard.run.leads_out",
            )

    def _runs(self, request: web.Request) -> dict[str, Any]:
        entries = []
        for name, path in self._folders().items():
            try:
                self._check_inside(path)
                entry = _entry(path, self._folder)
            except FileNotFoundError:  # deleted meanwhile
                continue
            except Exception as error:  # a file may hold anything; the other runs are shown
                entry = _fault_entry(path, _sentence(error))
            entries.append({"name": name, **entry})
        folder = os.fsencode(self._folder).decode("utf-8", "backslashreplace")
        return {"folder": folder, "runs": sorted(entries, key=lambda run: -run["time"])}

    def _run(self, request: web.Request) -> dict[str, Any] | None:
        name = _parameter(request, "name")
        with self._opened(name).opened() as run:
            stamp = _stamp(run)
            if request.query.get("stamp") == stamp:
                return None
            shown = {**overview(run, seconds=0.0), "name": name, "stamp": stamp}
            if run.progress:
                shown["span"] += f"; {run.progress}"
            return shown

    def _samples(self, request: web.Request) -> dict[str, Any]:
        with self._recorded(request) as (run, kind, _):
            step = _number(request, "step")
            rows = run.samples(step, kind)
            tokens = token_values(run, step, kind, [row.prompt_id for row in rows[:1]])
            columns = list(next(iter(tokens.values()), ()))
            return {
                "rows": [row.as_json() for row in rows[:MAX_ROWS]],
                "total": len(rows),
                "columns": columns,
            }

    def _tokens(self, request: web.Request) -> dict[str, Any]:
        with self._recorded(request) as (run, kind, _):
            return {
                "tokens": token_values(
                    run, _number(request, "step"), kind, [_number(request, "prompt")]
                )
            }

    def _prompt(self, request: web.Request) -> dict[str, Any]:
        with self._recorded(request) as (run, kind, steps):
            prompt = _number(request, "prompt")
            chosen = steps[:: max(1, math.ceil(len(steps) / _PROMPT_STEPS))]
            rows = [
                row for step in chosen for row in run.samples(step, kind) if row.prompt_id == prompt
            ]
            return {"rows": [row.as_json() for row in rows]}

    @contextlib.contextmanager
    def _recorded(self, request: web.Request) -> Iterator[tuple[RunFolder, Kind, list[int]]]:
        wanted = _parameter(request, "kind")
        with self._opened(_parameter(request, "name")).opened() as run:
            for kind, steps in run.kinds().items():
                if kind == wanted:
                    yield run, kind, steps
                    return
            raise DataError(
                f"{run.name} has no samples of the kind {wanted!r}",
                key="dashboard.samples.kind_unknown",
            )

    def _tables(self, request: web.Request) -> dict[str, Any]:
        names = list(dict.fromkeys(request.query.getall("name", [])))[:_OPEN_RUNS]
        with contextlib.ExitStack() as stack:
            # All requests lock runs in the same order, so that two of them cannot deadlock.
            runs = {
                name: stack.enter_context(self._opened(name).opened()) for name in sorted(names)
            }
            runs = {name: runs[name] for name in names}
            return {"tables": tables(runs) if len(runs) > 1 else []}


def serve(folder: str | Path, host: str = "127.0.0.1", port: int = 6060) -> None:
    """Serve the dashboard until Ctrl-C; port 0 takes a free port.

    Raises:
        DataError: there is no such folder.
        ReinforceError: the address cannot be used.
    """
    app = Dashboard(folder, host).application()
    try:
        listener = listen(host, port)
    except OSError as error:
        advice = "choose another with --port, or --port 0 for any free one"
        raise ReinforceError(
            f"{Address(host, port)} cannot be used to listen on ({error.strerror or error}); "
            f"{advice}",
            key="dashboard.address.not_usable",
        ) from error
    with listener:
        address = Address(host, listener.getsockname()[1]).local
        print(f"The runs of {folder} are on {address.url}; Ctrl-C ends", flush=True)
        if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            print(
                "Everyone who reaches this machine can read them: there is no password", flush=True
            )
        web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=1.0)


def _parameter(request: web.Request, name: str) -> str:
    if name not in request.query:
        raise web.HTTPBadRequest(text=f"the request lacks {name!r}")
    return request.query[name]


def _number(request: web.Request, name: str) -> int:
    text = _parameter(request, name)
    if not text.isascii() or not text.isdecimal():
        raise web.HTTPBadRequest(text=f"{name} is {text!r}; expected a number")
    return int(text)


async def _in_thread(answer: Callable[[], bytes | None]) -> bytes | None:
    """Call `answer` in a daemon thread. An executor's threads would delay the program's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes | None] = loop.create_future()

    def finish(body: bytes | None, error: Exception | None) -> None:
        if future.done():  # too late
            return
        if error is None:
            future.set_result(body)
        else:
            future.set_exception(error)

    def work() -> None:
        body = None
        fault = None
        try:
            body = answer()
        except Exception as error:
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, body, fault)

    threading.Thread(target=work, daemon=True).start()
    return await future


def _sentence(error: Exception) -> str:
    """Return an error of a run as a printable text."""
    text = (
        str(error)
        if isinstance(error, DataError | OSError)
        else f"it cannot be read ({type(error).__name__})"
    )
    # Names of files in it need not be UTF-8.
    return text.encode("utf-8", "backslashreplace").decode()


def _entry(path: Path, within: Path) -> dict[str, Any]:
    """Return a run's line in the list, without reading all of its metrics."""
    status = run_status(path, within=within)
    fault = status.reason if status.state == "unknown" else ""
    step = 0
    reward = None
    changed = path.stat().st_mtime
    with (
        contextlib.suppress(FileNotFoundError),
        open_regular(path / METRICS_FILE, within=within) as file,
    ):
        about = os.fstat(file.fileno())
        changed = about.st_mtime
        step, reward, fault_of_line = _end_of(
            path / METRICS_FILE, within, about.st_mtime_ns, about.st_size
        )
        fault = fault or fault_of_line
    return {
        "state": status.state,
        "step": max(step, status.step),
        "max_steps": status.max_steps,
        "reward": reward,
        "time": changed,
        "fault": fault,
    }


def _fault_entry(path: Path, fault: str) -> dict[str, Any]:
    """Return the line of a run that cannot be read."""
    changed = 0.0
    with contextlib.suppress(OSError):
        changed = path.stat().st_mtime
    return {
        "state": "unreadable",
        "step": 0,
        "max_steps": 0,
        "reward": None,
        "time": changed,
        "fault": fault,
    }


@functools.lru_cache(1024)
def _end_of(metrics: Path, within: Path, _changed: int, size: int) -> tuple[int, float | None, str]:
    """Return the last step and training reward near the end of a metrics.jsonl, and a fault there.

    The fault is "" for none.
    """
    step = 0
    reward = None
    fault = ""
    with open_regular(metrics, within=within) as file:
        file.seek(max(0, size - _TAIL))
        # The first line may be cut, and the last half-written.
        lines = file.read(_TAIL).split(b"\n")[int(size > _TAIL) : -1]
    for line in lines:
        try:
            line_step, values = checked_line(parse_line(line))
        except ValueError as error:
            fault = f"{metrics}: {error}"
            continue
        step = max(step, line_step)
        if "train/rewards" in values:
            reward = plain_number(values["train/rewards"])
    return step, reward, fault


def _stamp(run: RunFolder) -> str:
    places = [run.path / name for name in (METRICS_FILE, STATUS_FILE, HISTORY_FILE, *run.kinds())]
    stats = [(place.stat() if place.exists() else None) for place in places]
    changed = [(stat.st_mtime_ns, stat.st_size) if stat else 0 for stat in stats]
    return f"{hash((run.state().state, run.stamp, *changed)):x}"
