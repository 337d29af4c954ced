"""Run a reward server and an actor on one machine: start them in order, and stop both."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from reinforce_rl.errors import EXIT_STOPPED, ConfigError, Fault, ReinforceError, RewardServerError
from reinforce_rl.launch.health import health_fault
from reinforce_rl.launch.slurm.outcome import last_lines
from reinforce_rl.launch.slurm.settings import override_of, with_missing
from reinforce_rl.launch.slurm.task import StopSignal
from reinforce_rl.rewards.wire import DEFAULT_NAME
from reinforce_rl.utils.net import LOOPBACK, Address, check_port, checked_host, free_port
from reinforce_rl.utils.process import STOP_SIGNALS, Child, active_stop_signals
from reinforce_rl.utils.process_reaper import ProcessReaper

POLL_SECONDS = 0.2
REPORT_SECONDS = 10.0
LAST_LOG_LINES = 30
SERVE = ("-m", "reinforce_rl", "serve")  # arguments of Python
TRAIN = ("-m", "reinforce_rl", "train")


@dataclass(frozen=True)
class LaunchPlan:
    server: tuple[str, ...]
    actor: tuple[str, ...]
    server_log: Path
    address: Address  # where the server listens
    ready_seconds: float = 600.0  # until the server is ready, model loading included
    grace_seconds: float = 30.0  # from SIGTERM to SIGKILL


def make_plan(
    run_dir: Path,
    server_args: Sequence[str],
    actor_args: Sequence[str],
    *,
    server: Sequence[str] = SERVE,
    actor: Sequence[str] = TRAIN,
    **seconds: float,
) -> LaunchPlan:
    """Choose the port and pass it to both programs as Hydra overrides, unless the caller did.

    The server's `inference.host=ADDRESS` and `inference.port=N` fix its address, and
    `inference.name=NAME` the model's name; the actor also gets its `inference.token_file=FILE`.
    `seconds` are limits of the LaunchPlan.
    """
    given_host = (override_of(server_args, "inference.host") or LOOPBACK).strip("'\"")
    try:
        host = checked_host(given_host)
    except ValueError as error:
        raise ConfigError(
            [
                Fault(
                    f"inference.host is '{given_host}'; expected a host name or an address",
                    key="launch.host.invalid",
                )
            ]
        ) from error
    text = override_of(server_args, "inference.port")
    try:
        port = int(text or "0") or free_port(host)
    except ValueError as error:
        raise ConfigError(
            [
                Fault(
                    f"inference.port is '{text}'; expected a number",
                    key="launch.port.invalid",
                )
            ]
        ) from error
    address = Address(host, port)
    for_server = {"inference.host": host, "inference.port": port}
    name = override_of(server_args, "inference.name") or DEFAULT_NAME
    for_actor: dict[str, object] = {"ip": address.local.host, "port": port, "name": name}
    token_file = override_of(server_args, "inference.token_file")
    if token_file not in (None, "", "null"):
        for_actor["token_file"] = token_file
    for_actor = {f"remote_rm.reward_model.{key}": value for key, value in for_actor.items()}
    chosen = [f"inference.port={port}"] if text == "0" else []  # Hydra uses the last value
    of_server = (sys.executable, *server, *with_missing(server_args, for_server), *chosen)
    of_actor = (sys.executable, *actor, *with_missing(actor_args, for_actor))
    return LaunchPlan(of_server, of_actor, run_dir / "logs" / "server.log", address, **seconds)


def launch(plan: LaunchPlan, say: Callable[[str], None] = print) -> int:
    """Run both and return the actor's exit code, or 1 if the server failed first.

    Call on the main thread. SIGINT, SIGTERM and SIGUSR1 go to the actor, which saves and ends; then
    the server is stopped. If this process is killed, a reaper ends both.
    """
    handled = {
        number: signal.getsignal(number) for number in (signal.SIGINT, *active_stop_signals())
    }
    stop = StopSignal(tuple(handled))
    try:
        # Otherwise another run's server on this port would pass for ours until ours fails to bind.
        check_port(plan.address.host, plan.address.port)
        plan.server_log.parent.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.closing(
                ProcessReaper(grace_seconds=min(plan.grace_seconds, 10.0))
            ) as reaper,
            plan.server_log.open("wb") as log,
            contextlib.ExitStack() as children,
        ):
            server = _start(plan.server, reaper, log)
            children.callback(server.stop, plan.grace_seconds)
            say(f"reward server: process {server.pid}, log {plan.server_log}")
            _wait_until_ready(plan, server, stop, say)
            if stop.number is not None:
                return EXIT_STOPPED if stop.number in STOP_SIGNALS else 128 + stop.number
            actor = _start(plan.actor, reaper, None)
            children.callback(actor.stop, plan.grace_seconds)
            return _wait_for_actor(plan, server, actor, reaper, stop, say)
    except (ReinforceError, OSError) as error:
        text = error.with_keys() if isinstance(error, ReinforceError) else str(error)
        say(f"error: {text}")
        return 1
    finally:
        # `demo` continues in this process, and Ctrl-C must end it.
        for number, handler in handled.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], reaper: ProcessReaper, log: BinaryIO | None) -> Child:
    output = None if log is None else subprocess.STDOUT
    child = Child(command, stdout=log, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    reaper.watch_process(child.pid, whole_session=True)
    return child


def _wait_until_ready(
    plan: LaunchPlan, server: Child, stop: StopSignal, say: Callable[[str], None]
) -> None:
    local = plan.address.local
    start = time.monotonic()
    next_report = start + REPORT_SECONDS
    while stop.number is None:
        if server.exit_code is not None:
            raise _server_ended(plan, server, "before it was ready")
        fault = health_fault(local)
        elapsed = time.monotonic() - start
        if fault is None:
            say(f"reward server: ready at {local.url} after {elapsed:.0f} s")
            return
        if elapsed > plan.ready_seconds:
            raise RewardServerError(
                f"the reward server was not ready within {plan.ready_seconds:.0f} s ({fault}); "
                f"{last_lines(plan.server_log, LAST_LOG_LINES)}",
                key="launch.server.not_ready",
            )
        if time.monotonic() >= next_report:
            say(f"reward server: {fault}; waiting, {elapsed:.0f} s of {plan.ready_seconds:.0f} s")
            next_report += REPORT_SECONDS
        time.sleep(POLL_SECONDS)


def _wait_for_actor(
    plan: LaunchPlan,
    server: Child,
    actor: Child,
    reaper: ProcessReaper,
    stop: StopSignal,
    say: Callable[[str], None],
) -> int:
    deadline: float | None = None  # after a signal
    while (code := actor.exit_code) is None:
        reaper.check()
        if stop.number is not None and deadline is None:
            deadline = time.monotonic() + plan.grace_seconds
            actor.send_signal(stop.number)
        if stop.number is not None and deadline is not None and time.monotonic() > deadline:
            say(
                f"the actor did not end within {plan.grace_seconds:.0f} s of the signal; killing it"
            )
            actor.kill()
            return 128 + stop.number
        if server.exit_code is not None and deadline is None:
            raise _server_ended(plan, server, "while the actor was running")
        time.sleep(POLL_SECONDS)
    return code if code >= 0 else 128 - code


def _server_ended(plan: LaunchPlan, server: Child, when: str) -> RewardServerError:
    return RewardServerError(
        f"the reward server ended {when}, with exit code {server.exit_code}; "
        f"{last_lines(plan.server_log, LAST_LOG_LINES)}",
        key="launch.server.ended",
    )


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the launcher's arguments, the server's and the actor's."""
    parts: dict[str, list[str]] = {"": [], "--server-args": [], "--actor-args": []}
    current = ""
    for argument in argv:
        if argument in parts and argument:
            current = argument
        else:
            parts[current].append(argument)
    return parts[""], parts["--server-args"], parts["--actor-args"]
