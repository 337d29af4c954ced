"""The supervisor of a job: starts the reward servers and the actor, watches both, and ends or requeues the job.

`slurm/train_hetjob.sbatch` starts it on the batch host, with ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...].
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reinforce_rl.errors import (
    EXIT_ALERT,
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_FINISHED,
    EXIT_STOPPED,
    ConfigError,
    Fault,
    ReinforceError,
)
from reinforce_rl.launch.slurm import outcome, steps
from reinforce_rl.launch.slurm.generators import Generators
from reinforce_rl.launch.slurm.outcome import Attempt, Outcome, TaskEnd, judge
from reinforce_rl.launch.slurm.rendezvous import Endpoint, health_fault, read_endpoint
from reinforce_rl.launch.slurm.settings import (
    REPOSITORY,
    Allocation,
    Settings,
    read_allocation,
    read_settings,
)
from reinforce_rl.launch.slurm.steps import POLL_SECONDS, Step, StepPlan
from reinforce_rl.launch.slurm.task import StopSignal
from reinforce_rl.runtime.status import saved_step
from reinforce_rl.utils.slurm_commands import SlurmCallError, call, job_times

REPORT_SECONDS = 30.0
REQUEUE_SECONDS = 30.0  # reserved for the requeue before the end of the allocation
LEAST_SECONDS = 10.0
HEALTH_POLL_SECONDS = 1.0
STOPPED_SECONDS = 10.0  # between the ends of tasks that stop together
STOPPED_ALONE_SECONDS = 60.0  # for the others to end, once they are asked to


class Job:
    def __init__(
        self,
        settings: Settings,
        allocation: Allocation,
        environment: dict[str, str],
        stop: StopSignal,
    ):
        self._settings = settings
        self._allocation = allocation
        self._environment = environment
        self._stop = stop
        self._folder = settings.slurm_folder / f"{allocation.job_id}-{allocation.restart}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._steps: list[Step] = []
        self._end_time: int | None = None
        # Of the actor's tasks, where the others did not stop with it.
        self._first_stopped: TaskEnd | None = None

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not prevent an orderly end
            sys.stdout.write(
                "".join(f"{time.strftime('%H:%M:%S')} {line}\n" for line in text.splitlines())
            )
            sys.stdout.flush()

    def run(self) -> int:
        settings = self._settings
        job = self._allocation.job_id
        restart = self._allocation.restart
        jobs = [component.job_id for component in self._allocation.components]
        steps.end_stale_steps(jobs, settings.grace_seconds, self._log)
        attempts = outcome.read_attempts(settings.slurm_folder)
        args = (settings.actor_args, settings.server_args)
        if text := outcome.finished(settings.run_dir, attempts, args):
            self._log(f"{text}; nothing was started")
            return EXIT_FINISHED
        step = saved_step(self._settings.run_dir)
        if text := self._refusal(attempts, step):
            refused = ReinforceError(
                f"{text}. Nothing was started; the run stands at step {step}.",
                key=text.key,
            )
            self._log(f"error: {refused.with_keys()}")
            return EXIT_ERROR
        attempt = Attempt(job, restart, time.time(), step, args)
        outcome.write_attempt(settings.slurm_folder, attempt)
        self._log(
            f"job {job}, restart {restart}: run {settings.run_dir} at step {step}, logs in {self._folder}"
        )
        for other in attempts:
            if other.job == job and other.end is None:
                self._log(
                    f"restart {other.restart} left no record: a node failed, or somebody requeued the job"
                )
        try:
            result = self._attempt()
        finally:
            for left in self._steps:  # after an error of the supervisor itself
                if not left.has_ended:
                    left.end(signal.SIGTERM, time.monotonic() + settings.grace_seconds)
        return self._close(attempt, result)

    def _refusal(self, attempts: Sequence[Attempt], step: int) -> Fault | None:
        job = self._allocation.job_id
        restart = self._allocation.restart
        for other in sorted(
            {attempt.job for attempt in attempts if attempt.end is None and attempt.job != job}
        ):
            if steps.job_states(other) & {"R", "CF", "S", "ST"}:  # it has nodes
                return Fault(
                    f"job {other} works in {self._settings.run_dir}; wait for it, or cancel it (scancel {other})",
                    key="slurm.run_dir.in_use",
                )
        return outcome.refusal(
            attempts, job=job, restart=restart, max_restarts=self._settings.max_restarts, step=step
        )

    def _attempt(self) -> Outcome:
        self._make_token()
        self._set_times()
        settings = self._settings
        allocation = self._allocation
        step_before = saved_step(settings.run_dir)
        nodes = [
            call(
                [
                    "scontrol",
                    "show",
                    "hostnames",
                    self._environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"],
                ]
            ).split()
            for group in range(len(allocation.components))
        ]
        servers = [
            self._start(
                steps.server_plan(
                    settings, allocation, number, nodes[0], self._folder, nodes[1][:1]
                )
            )
            for number in range(settings.servers)
        ]
        endpoints = self._wait_until_healthy(servers)
        if isinstance(endpoints, Outcome):
            return endpoints
        actor = self._start(steps.actor_plan(settings, allocation, endpoints, nodes[0][:1]))
        generators = None
        if (component := allocation.generator) is not None:

            def start(number: int, restart: int) -> Step:
                place = (number, restart, nodes[2], endpoints, nodes[1][:1])
                return self._start(steps.generator_plan(settings, allocation, *place))

            count = component.nodes * (component.devices // allocation.generator_ranks)
            generators = Generators(count, settings.generator_restarts, start, self._log)
        if self._never_began(actor):
            # Seen of Slurm 22.05 after a node came back: its step is there, and no node was asked
            # to start a task.
            text = f"no task of {actor.name} has begun within {settings.ready_seconds:.0f} s of its step's start"
            actor.end(signal.SIGTERM, time.monotonic() + LEAST_SECONDS)
            self._end_servers([*(generators.running if generators else ()), *servers])
            return Outcome(EXIT_ERROR, text, never_began=True)
        unasked = self._watch(servers, actor, generators)
        by_itself = self._end_all(servers, actor, unasked, generators)
        ends = [end for server in servers for end in server.ends()]
        lost = [end for step in (*servers, actor) for end in step.lost()]
        signalled = self._stop.number
        if signalled is None and self._first_stopped is not None:
            signalled = signal.SIGTERM
        reason = {"unasked": unasked, "signalled": signalled, "killed": not by_itself}
        result = judge(actor.ends(), ends, lost, **reason)
        if self._first_stopped is not None and saved_step(settings.run_dir) == step_before:
            return replace(result, never_began=True)
        return result

    def _make_token(self) -> None:
        path = self._settings.token_file
        if not path.exists():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".token.")  # mode 0600
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            os.replace(name, path)  # atomic

    def _set_times(self) -> None:
        try:
            jobs = (self._allocation.server.job_id, self._allocation.actor.job_id)
            start, self._end_time = job_times(*jobs)
        except SlurmCallError as error:
            self._log(f"warning: when this job ends is not known: {error}")
            return
        times = {"SLURM_JOB_START_TIME": start, "SLURM_JOB_END_TIME": self._end_time}
        self._environment.update(
            {name: str(value) for name, value in times.items() if value is not None}
        )

    def _start(self, plan: StepPlan) -> Step:
        line = steps.srun_line(self._settings, plan, self._folder)
        step = Step(plan, line, self._environment, self._folder, self._log)
        self._steps.append(step)
        ranks = plan.num_nodes * plan.component.devices
        self._log(
            f"{plan.name}: {ranks} rank{'s' if ranks > 1 else ''}, log {self._folder / plan.name}.log"
        )
        return step

    def _wait_until_healthy(self, servers: Sequence[Step]) -> list[Endpoint] | Outcome:
        """Return the servers' endpoints once all can score."""
        start = time.monotonic()
        next_report = REPORT_SECONDS
        limit = self._settings.ready_seconds
        healthy: dict[str, Endpoint] = {}
        while True:
            why = ""
            for server in servers:
                if server.has_ended:
                    return self._never_healthy(
                        servers, f"{server.name} ended before it was healthy"
                    )
                if server.name in healthy:
                    continue
                endpoint = read_endpoint(self._folder, server.name)
                fault = health_fault(endpoint.http) if endpoint else "its tasks have not begun"
                if endpoint and not fault:
                    healthy[server.name] = endpoint
                    self._log(f"{server.name}: healthy at http://{endpoint.http} ({endpoint.host})")
                else:
                    why = f"{server.name}: {fault}"
            if len(healthy) == len(servers):
                return [healthy[server.name] for server in servers]
            elapsed = time.monotonic() - start
            if self._stop.number is not None:
                return self._never_healthy(
                    servers, f"{self._stop.name} came before the reward server was healthy"
                )
            if elapsed > limit:
                return self._never_healthy(
                    servers, f"no healthy reward server within {limit:.0f} s ({why})"
                )
            if elapsed >= next_report:
                self._log(f"waiting, {elapsed:.0f} s of {limit:.0f} s: {why}")
                next_report += REPORT_SECONDS
            time.sleep(HEALTH_POLL_SECONDS)

    def _never_healthy(self, servers: Sequence[Step], text: str) -> Outcome:
        ended = [server for server in servers if server.has_ended]
        self._end_servers(servers)
        if self._stop.number is not None:
            return Outcome(EXIT_STOPPED, text)
        if not ended:
            return Outcome(EXIT_ERROR, text, None, servers[0].name)
        ends = [end for server in ended for end in server.ends()]
        lost = [end for server in ended for end in server.lost()]
        result = judge([], ends, lost, unasked=ended[0].name, signalled=None)
        return replace(result, text=f"{text}; {result.text}", log_of=ended[0].name)

    def _failed_nodes(self) -> list[str]:
        return sorted({step.failed_node for step in self._steps} - {""})

    def _never_began(self, actor: Step) -> bool:
        """Wait for the actor's first task; return True if it has not begun within `ready_seconds`."""
        deadline = time.monotonic() + self._settings.ready_seconds
        while (
            not actor.has_ended
            and self._stop.number is None
            and read_endpoint(self._folder, actor.name) is None
        ):
            if time.monotonic() > deadline:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _watch(self, servers: Sequence[Step], actor: Step, generators: Generators | None) -> str:
        """Wait for the actor's end, a signal, or the last server's end; return that server's name."""
        left = list(servers)
        while not actor.has_ended and self._stop.number is None:
            for server in [server for server in left if server.has_ended]:
                left.remove(server)
                if not left:
                    return server.name
                names = ", ".join(other.name for other in left)
                self._log(
                    f"{server.name} has ended without being asked to; the run goes on with {names}"
                )
            if generators is not None:
                generators.look()
            self._first_stopped = self._stopped_alone(actor)
            if self._first_stopped is not None:
                return ""
            time.sleep(POLL_SECONDS)
        return ""

    def _stopped_alone(self, actor: Step) -> TaskEnd | None:
        """Return the task that stopped a while ago while others still run; None for none.

        Slurm 22.05 may signal the tasks of one node alone, to end the step of an earlier attempt
        that this node has missed. Where the run has not begun, the other ranks wait for this one.
        """
        ends = [end for end in actor.ends() if end.code in outcome.STOPPED]
        first = min(ends, key=lambda end: end.time, default=None)
        if first is None or time.time() - first.time < STOPPED_SECONDS:
            return None
        return first

    def _end_all(
        self,
        servers: Sequence[Step],
        actor: Step,
        unasked: str,
        generators: Generators | None = None,
    ) -> bool:
        """End the actor, then what it may still wait for; return True if the actor ended by itself."""
        by_itself = True
        for node in self._failed_nodes():
            step = saved_step(self._settings.run_dir)
            self._log(
                f"node {node} has failed: Slurm requeues the job, and it goes on from step {step}"
            )
        if not actor.has_ended:
            if unasked:
                why = f"{unasked} has ended without being asked to"
            elif self._stop.number is None and self._first_stopped is not None:
                why = f"{self._first_stopped}, and the others have not"
            else:
                why = f"got {self._stop.name}"
            if self._stop.number == signal.SIGTERM:
                why += " (the job is being cancelled, or requeued by somebody)"
            self._log(f"{why}; the actor is asked to save and to end")
            number = signal.SIGUSR1 if self._stop.number == signal.SIGUSR1 else signal.SIGTERM
            by_itself = actor.end(number, self._actor_deadline())
            # Log it before the servers end: Slurm may kill a cancelled job meanwhile.
            self._log(
                f"the actor has ended; the newest checkpoint is of step {saved_step(self._settings.run_dir)}"
            )
        # Generators, too, wait for servers.
        self._end_servers(generators.running if generators else ())
        self._end_servers(servers)
        return by_itself

    def _actor_deadline(self) -> float:
        if self._stop.number is None and self._first_stopped is not None:
            # Ranks stop once all have saved, or before the run began.
            return time.monotonic() + min(self._settings.grace_seconds, STOPPED_ALONE_SECONDS)
        return self._deadline()

    def _deadline(self) -> float:
        """Return when to SIGKILL: near the end of the allocation, with time left for a requeue."""
        seconds = self._settings.grace_seconds
        if self._stop.number == signal.SIGUSR1 and self._end_time is not None:
            seconds = max(self._end_time - REQUEUE_SECONDS - time.time(), LEAST_SECONDS)
        return time.monotonic() + seconds

    def _end_servers(self, servers: Sequence[Step]) -> None:
        deadline = self._deadline()
        for server in servers:
            if not server.has_ended:
                server.signal(signal.SIGTERM)  # all at once; `end` repeats a signal that was lost
        for server in servers:
            server.end(signal.SIGTERM, deadline)

    def _close(self, attempt: Attempt, result: Outcome) -> int:
        step = saved_step(self._settings.run_dir)
        if result.log_of:
            self._log(outcome.last_lines(self._folder / f"{result.log_of}.log"))
        self._log(result.text)
        requeue, what = self._next(attempt, result, step)
        self._log(
            f"the run stands at step {step}, which was {attempt.step_before} when this attempt began; {what}"
        )
        first = result.first.name if result.first else None
        how = {
            "reason": result.text,
            "exit_code": result.code,
            "first_failed": first,
            "requeued": requeue,
        }
        closed = replace(attempt, end=time.time(), step_after=step, **how)
        with contextlib.suppress(OSError):
            outcome.write_attempt(self._settings.slurm_folder, closed)
        if requeue:
            try:
                call(["scontrol", "requeue", self._allocation.job_id])  # with all its components
            except SlurmCallError as error:
                failed = ReinforceError(
                    f"the job could not be requeued ({error}); submit the same command again",
                    key="slurm.job.not_requeued",
                )
                self._log(f"error: {failed.with_keys()}")
                with contextlib.suppress(OSError):
                    outcome.write_attempt(
                        self._settings.slurm_folder, replace(closed, requeued=False)
                    )
        return result.code

    def _next(self, attempt: Attempt, result: Outcome, step: int) -> tuple[bool, str]:
        """Decide whether to requeue the job at `step`; return the decision and what comes next."""
        if result.code == EXIT_FINISHED:
            return False, "nothing is left to do"
        go_on = f"submit the same command again to go on from step {step}"
        if names := " and ".join(self._failed_nodes()):
            return (
                False,
                f"Slurm itself requeues the job, since {names} failed; it goes on from step {step}",
            )
        if self._stop.number not in (None, signal.SIGUSR1):
            return False, f"not requeued after {self._stop.name}; {go_on}"
        if result.code == EXIT_DIVERGED:
            return (
                False,
                "not requeued: the policy has diverged, and would again from the same checkpoint",
            )
        if result.code == EXIT_ALERT:
            return False, f"not requeued: an alert has stopped the run; {go_on}"
        restart = self._allocation.restart
        max_restarts = self._settings.max_restarts
        if result.never_began and restart < max_restarts:  # `_refusal` ends what never gets further
            return True, "requeued, as another attempt may begin"
        if result.code != EXIT_STOPPED and self._settings.restart_after_crash != "true":
            return (
                False,
                f"not requeued after a failure (REINFORCE_RESTART_AFTER_CRASH is false); {go_on}",
            )
        requeue, why = outcome.may_requeue(restart, max_restarts, attempt.step_before, step)
        if requeue:
            return True, f"requeued: {why}; Slurm waits about two minutes before"
        return False, f"not requeued: {why}; {go_on}"


def main(argv: Sequence[str] | None = None) -> int:
    stop = StopSignal()
    repository = Path(os.environ.get(REPOSITORY) or Path(__file__).resolve().parents[3])
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ, repository)
        allocation = read_allocation(settings, os.environ)
    except ConfigError as error:
        print(f"error: {error.with_keys()}", flush=True)
        return EXIT_ERROR
    try:
        return Job(settings, allocation, dict(os.environ), stop).run()
    except OSError as error:
        failed = ReinforceError(
            f"the job cannot work in {settings.run_dir}, the run's folder: {error}",
            key="slurm.run_dir.unusable",
        )
    except SlurmCallError as error:
        failed = ReinforceError(
            f"Slurm does not answer: {error}",
            key="slurm.command.failed",
        )
    print(f"error: {failed.with_keys()}", flush=True)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
