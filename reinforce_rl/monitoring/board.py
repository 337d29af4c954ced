"""`reinforce-rl board FOLDER`: the runs below a folder on a local page that follows them.

    GET /                                   the page; /board.js, /board.css and /plotly.js belong to it
    GET /api/runs                           {folder, runs: [{name, state, step, max_steps, time, reward}, ...]}
    GET /api/run?name=N[&stamp=S]           `report.overview` and {stamp}; 204 if it still is that stamp
    GET /api/samples?name=N&kind=K&step=I   {rows: [...], total, columns}: columns of tokens, if recorded
    GET /api/tokens?name=N&kind=K&step=I&prompt=I    {tokens: {"PROMPT SAMPLE": {column: [...]}}}
    GET /api/prompt?name=N&kind=K&prompt=I  {rows: [...]}: samples of one prompt, by ascending step
    GET /api/tables?name=N&name=M[&...]     {tables: [...]}: the comparison of runs

A fault is answered with {error: text}. Names are those of /api/runs; no path is taken from a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from reinforce_rl.errors import DataError, ReinforceError
from reinforce_rl.monitoring.compare import tables
from reinforce_rl.monitoring.loggers import METRICS_FILE
from reinforce_rl.monitoring.records import Kind
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder, runs_below
from reinforce_rl.monitoring.view import MAX_ROWS, PAGE, plotly, render, token_values
from reinforce_rl.runtime.settings import HISTORY_FILE
from reinforce_rl.runtime.status import STATUS_FILE, run_status
from reinforce_rl.utils.files import plain_number
from reinforce_rl.utils.net import Address, listen

_OPEN_RUNS = 32  # whose metrics are held in memory
_SCAN_SECONDS = 1.0  # between looks for runs
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl in which the list looks for the last reward
_PROMPT_STEPS = 60  # step files in which one prompt is looked for
_HEADERS = {
    # Plotly writes its styles into the document.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Board:
    """The aiohttp application; `host` is the name that it may be asked by, besides localhost and addresses."""

    def __init__(self, folder: str | Path, host: str = "127.0.0.1"):
        self._folder, self._host = Path(folder), host
        if not self._folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected a folder with runs in it, or that of a run")
        self._scanned: tuple[float, dict[str, Path]] = (-math.inf, {})
        self._open = functools.lru_cache(_OPEN_RUNS)(RunFolder)
        self._reader = ThreadPoolExecutor(1)  # files are read in turn, away from the event loop

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around])
        page: dict[str, tuple[str, Callable[[], str]]] = {
            "": ("html", render),
            "plotly.js": ("javascript", plotly),
            "board.js": ("javascript", (PAGE / "board.js").read_text),
            "board.css": ("css", (PAGE / "board.css").read_text),
        }
        for name, (kind, read) in page.items():
            app.router.add_get(f"/{name}", self._handler(f"text/{kind}", lambda _, read=read: read()))
        asked = {"runs": self._runs, "run": self._run, "samples": self._samples, "tokens": self._tokens}
        for name, answer in {**asked, "prompt": self._prompt, "tables": self._tables}.items():
            app.router.add_get(f"/api/{name}", self._handler("application/json", answer))
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not self._is_ours(request.host):
                advice = "ask by localhost or an address, or start the board with --host and that name"
                raise web.HTTPMisdirectedRequest(text=f"this board is not {request.host}; {advice}")
            response = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.text}, status=error.status)
        except (DataError, OSError) as error:  # also a file of a run that is being deleted
            response = web.json_response({"error": str(error)}, status=404)
        response.headers.update(_HEADERS)
        return response

    def _is_ours(self, host: str) -> bool:
        """Refuse names that a foreign page could have pointed here (DNS rebinding)."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name.strip("[]")))
        return name.lower() in ("localhost", self._host.lower())

    def _handler(self, kind: str, answer: Callable[[web.Request], Any]) -> Handler:
        """Handle a request by text or values that become JSON, or by 204 for None."""

        def encoded(request: web.Request) -> bytes | None:
            found = answer(request)
            text = found if isinstance(found, str | None) else json.dumps(found, ensure_ascii=False, allow_nan=False)
            return text if text is None else text.encode()

        async def handle(request: web.Request) -> web.Response:
            body = await asyncio.get_running_loop().run_in_executor(self._reader, encoded, request)
            if body is None:
                return web.Response(status=204)
            response = web.Response(body=body, content_type=kind, charset="utf-8")
            response.enable_compression()
            return response

        return handle

    def _found(self) -> dict[str, Path]:
        scanned, found = self._scanned
        if time.monotonic() > scanned + _SCAN_SECONDS:
            root, paths = self._folder, runs_below(self._folder)
            found = {
                path.relative_to(root).as_posix() if path != root else root.resolve().name: path for path in paths
            }
            self._scanned = (time.monotonic(), found)
        return found

    def _opened(self, name: str) -> RunFolder:
        path = self._found().get(name)
        if path is None:
            raise DataError(f"no run {name!r} below {self._folder}")
        return self._open(path)

    def _runs(self, request: web.Request) -> dict[str, Any]:
        found = []
        for name, path in self._found().items():
            with contextlib.suppress(OSError):  # deleted meanwhile
                found.append({"name": name, **_entry(path)})
        return {"folder": str(self._folder), "runs": sorted(found, key=lambda run: -run["time"])}

    def _run(self, request: web.Request) -> dict[str, Any] | None:
        name = _asked(request, "name")
        run = self._opened(name)
        stamp = _stamp(run)
        if request.query.get("stamp") == stamp:
            return None
        run.refresh()
        return {**overview(run), "name": name, "stamp": stamp}

    def _samples(self, request: web.Request) -> dict[str, Any]:
        run, kind, _ = self._recorded(request)
        step = _number(request, "step")
        rows = run.samples(step, kind)
        tokens = token_values(run, step, kind, [row.prompt_id for row in rows[:1]])
        columns = list(next(iter(tokens.values()), ()))
        return {"rows": [row.as_json() for row in rows[:MAX_ROWS]], "total": len(rows), "columns": columns}

    def _tokens(self, request: web.Request) -> dict[str, Any]:
        run, kind, _ = self._recorded(request)
        return {"tokens": token_values(run, _number(request, "step"), kind, [_number(request, "prompt")])}

    def _prompt(self, request: web.Request) -> dict[str, Any]:
        run, kind, steps = self._recorded(request)
        prompt = _number(request, "prompt")
        chosen = steps[:: max(1, math.ceil(len(steps) / _PROMPT_STEPS))]
        return {"rows": [row.as_json() for i in chosen for row in run.samples(i, kind) if row.prompt_id == prompt]}

    def _recorded(self, request: web.Request) -> tuple[RunFolder, Kind, list[int]]:
        run, asked = self._opened(_asked(request, "name")), _asked(request, "kind")
        for kind, steps in run.kinds().items():
            if kind == asked:
                return run, kind, steps
        raise DataError(f"{run.name} has no samples of the kind {asked!r}")

    def _tables(self, request: web.Request) -> dict[str, Any]:
        names = list(dict.fromkeys(request.query.getall("name", [])))
        runs = {name: self._opened(name) for name in names[:_OPEN_RUNS]}
        for run in runs.values():
            run.refresh()
        return {"tables": tables(runs) if len(runs) > 1 else []}


def serve(folder: str | Path, host: str = "127.0.0.1", port: int = 6060) -> None:
    """Serve the board until Ctrl-C; port 0 takes a free one.

    Raises:
        DataError: there is no such folder.
        ReinforceError: the address cannot be used.
    """
    app = Board(folder, host).application()
    try:
        listener = listen(host, port)
    except OSError as error:
        advice = "choose another with --port, or --port 0 for any free one"
        raise ReinforceError(
            f"{Address(host, port)} cannot be listened on ({error.strerror or error}); {advice}"
        ) from error
    with listener:
        address = Address(host, listener.getsockname()[1]).local
        print(f"The runs of {folder} are on {address.url}; Ctrl-C ends", flush=True)
        if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            print("Everyone who reaches this machine can read them: there is no password", flush=True)
        web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=1.0)


def _asked(request: web.Request, name: str) -> str:
    if name not in request.query:
        raise web.HTTPBadRequest(text=f"the request lacks {name!r}")
    return request.query[name]


def _number(request: web.Request, name: str) -> int:
    text = _asked(request, name)
    if not text.isascii() or not text.isdecimal():
        raise web.HTTPBadRequest(text=f"{name} is {text!r}; expected a number")
    return int(text)


def _entry(path: Path) -> dict[str, Any]:
    """Return a run's line in the list, without reading all of its metrics."""
    status, metrics = run_status(path), path / METRICS_FILE
    changed = metrics.stat() if metrics.is_file() else None
    step, reward = _end_of(metrics, changed.st_mtime_ns, changed.st_size) if changed else (0, None)
    seen = {"state": status.state, "step": max(step, status.step), "max_steps": status.max_steps}
    return {**seen, "reward": reward, "time": (changed or path.stat()).st_mtime}


@functools.lru_cache(1024)
def _end_of(metrics: Path, _changed: int, size: int) -> tuple[int, float | None]:
    """Return the last step and the last training reward near the end of a metrics.jsonl."""
    step, reward = 0, None
    with metrics.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        for line in file.read().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # cut at either end, or damaged
                found = json.loads(line)
                step = max(step, int(found["step"]))
                reward = plain_number(found["train/rewards"])
    return step, reward


def _stamp(run: RunFolder) -> str:
    places = [run.path / name for name in (METRICS_FILE, STATUS_FILE, HISTORY_FILE, *run.kinds())]
    stats = [(place.stat() if place.exists() else None) for place in places]
    changed = [(found.st_mtime_ns, found.st_size) if found else 0 for found in stats]
    return f"{hash((run.state().state, *changed)):x}"
