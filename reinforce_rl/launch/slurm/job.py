"""The supervisor of a job: starts the reward servers and the actor, watches both, and ends or requeues the job.

python -m reinforce_rl.launch.slurm.job ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]

It runs on the batch host, as `slurm/train_hetjob.sbatch` starts it.
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
from types import FrameType

from reinforce_rl.errors import EXIT_DIVERGED, EXIT_ERROR, EXIT_FINISHED, EXIT_STOPPED, ConfigError
from reinforce_rl.launch.slurm import calls, health, history
from reinforce_rl.launch.slurm.allocation import Allocation, read_allocation
from reinforce_rl.launch.slurm.calls import SlurmCallError
from reinforce_rl.launch.slurm.commands import StepPlan, actor_plan, server_plan, srun_environment, srun_line
from reinforce_rl.launch.slurm.history import Attempt, History
from reinforce_rl.launch.slurm.journal import Journal, last_lines
from reinforce_rl.launch.slurm.outcome import FAILED, FINISHED, STOPPED, Ending, judge
from reinforce_rl.launch.slurm.rendezvous import Place, look_up
from reinforce_rl.launch.slurm.settings import REPOSITORY, RESTART_AFTER_CRASH, Settings, read_settings
from reinforce_rl.launch.slurm.stale_steps import end_earlier_steps
from reinforce_rl.launch.slurm.steps import POLL_SECONDS, Step

REPORT_SECONDS = 30.0
REQUEUE_SECONDS = 30.0  # before the end of the allocation, when only a requeue must still fit
LEAST_SECONDS = 10.0
ASK_SECONDS = 1.0


class StopSignal:
    """The first signal that this process got, and when."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at = 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self.at = number, time.monotonic()


class Job:
    """One attempt at the run.

    Args:
        settings: of the job.
        allocation: what Slurm gave it.
        environment: of the tasks.
        stop: the signals of this process.
    """

    def __init__(self, settings: Settings, allocation: Allocation, environment: dict[str, str], stop: StopSignal):
        self._settings = settings
        self._allocation = allocation
        self._environment = environment
        self._stop = stop
        self._folder = settings.slurm_folder / allocation.label
        self._folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self._folder / "job.log")
        self._say = self._journal.say
        self._history = History(settings.slurm_folder / history.HISTORY_FILE)
        self._steps: list[Step] = []
        self._end_time: int | None = None

    def run(self) -> int:
        """The exit code."""
        jobs = (self._allocation.server.job_id, self._allocation.actor.job_id)
        end_earlier_steps(jobs, self._settings.grace_seconds, self._say)
        attempts = self._history.attempts()
        args = (self._settings.actor_args, self._settings.server_args)
        text = history.finished(self._settings.run_dir, attempts, args)
        if text is not None:
            self._say(f"{text}; nothing was started")
            return EXIT_FINISHED
        step = history.newest_checkpoint(self._settings.run_dir)
        text = self._why_not(attempts, step)
        if text is not None:
            self._say(f"error: {text}. Nothing was started; the run stands at step {step}.")
            return EXIT_ERROR
        attempt = Attempt(self._allocation.job_id, self._allocation.restart, time.time(), step, args)
        self._history.write(attempt)
        self._say(
            f"job {self._allocation.job_id}, restart {self._allocation.restart}: run {self._settings.run_dir} at step "
            f"{step}, logs in {self._folder}"
        )
        for other in attempts:
            if other.job == attempt.job and other.end is None:
                self._say(f"restart {other.restart} ended without a word: a node failed, or somebody requeued the job")
        try:
            ending = self._attempt()
        finally:
            for left in self._steps:  # after an error of this program itself
                if not left.has_ended:
                    left.end(signal.SIGTERM, time.monotonic() + self._settings.grace_seconds)
        return self._close(attempt, ending)

    def _why_not(self, attempts: Sequence[Attempt], step: int) -> str | None:
        job, restart = self._allocation.job_id, self._allocation.restart
        open_jobs = {attempt.job for attempt in attempts if attempt.end is None and attempt.job != job}
        for other in sorted(open_jobs):
            if calls.is_running(other):
                return f"job {other} works in {self._settings.run_dir}; wait for it, or cancel it (scancel {other})"
        return history.refusal(attempts, job=job, restart=restart, max_restarts=self._settings.max_restarts, step=step)

    def _attempt(self) -> Ending:
        """Servers, then the actor, to their end."""
        self._make_token()
        times = self._times()
        self._end_time = times.end
        for name, value in (("SLURM_JOB_START_TIME", times.start), ("SLURM_JOB_END_TIME", times.end)):
            if value is not None:
                self._environment[name] = str(value)
        server_nodes = calls.node_names(self._environment["SLURM_JOB_NODELIST_HET_GROUP_0"])
        actor_nodes = calls.node_names(self._environment["SLURM_JOB_NODELIST_HET_GROUP_1"])
        servers = [
            self._start(
                server_plan(self._settings, self._allocation, number, server_nodes, self._folder, actor_nodes[:1])
            )
            for number in range(self._settings.servers)
        ]
        places = self._wait_until_healthy(servers)
        if isinstance(places, Ending):
            return places
        actor = self._start(actor_plan(self._settings, self._allocation, places, server_nodes[:1]))
        unasked = self._watch(servers, actor)
        by_itself = self._end_all(servers, actor, unasked)
        lost = [end for step in self._steps for end in step.lost()]
        return judge(
            actor.ends(),
            [end for server in servers for end in server.ends()],
            lost,
            unasked=unasked,
            told=self._stop.number,
            killed=not by_itself,
            unstarted=[] if actor.ends() or actor.lost() or self._stop.number else [actor.name],
        )

    def _make_token(self) -> None:
        path = self._settings.token_file
        if path.exists():
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".token.")  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        os.replace(name, path)  # whole, or not at all

    def _times(self) -> calls.JobTimes:
        try:
            server = calls.job_times(self._allocation.server.job_id)
            actor = calls.job_times(self._allocation.actor.job_id)
        except SlurmCallError as error:
            self._say(f"warning: when this job ends is not known: {error}")
            return calls.JobTimes()
        # They differ where Slurm has requeued component 0 alone.
        ends = [times.end for times in (server, actor) if times.end is not None]
        return calls.JobTimes(server.start, min(ends, default=None))

    def _start(self, plan: StepPlan) -> Step:
        line = srun_line(self._settings, plan, self._folder)
        step = Step(plan, line, srun_environment(self._environment), self._folder, self._say)
        self._steps.append(step)
        self._say(f"{plan.name}: {plan.ranks} rank{'s' if plan.ranks > 1 else ''}, log {step.log}")
        return step

    def _wait_until_healthy(self, servers: Sequence[Step]) -> list[Place] | Ending:
        """Where the servers are, as soon as all can score."""
        start = time.monotonic()
        next_report = start + REPORT_SECONDS
        healthy: dict[str, Place] = {}
        while True:
            why = ""
            for server in servers:
                if server.has_ended:
                    return self._never_healthy(servers, f"{server.name} ended before it was healthy")
                if server.name in healthy:
                    continue
                place = look_up(self._folder, server.name)
                fault = health.ask(place.address, place.http_port) if place else "its tasks have not begun"
                if place is not None and fault is None:
                    healthy[server.name] = place
                    self._say(f"{server.name}: healthy at http://{place.http} ({place.host})")
                elif fault is not None:
                    why = f"{server.name}: {fault}"
            if len(healthy) == len(servers):
                return [healthy[server.name] for server in servers]
            elapsed = time.monotonic() - start
            if self._stop.number is not None:
                return self._never_healthy(servers, f"{self._signal_name()} came before the reward server was healthy")
            if elapsed > self._settings.ready_seconds:
                return self._never_healthy(
                    servers, f"no healthy reward server within {self._settings.ready_seconds:.0f} s ({why})"
                )
            if time.monotonic() >= next_report:
                self._say(f"waiting, {elapsed:.0f} s of {self._settings.ready_seconds:.0f} s: {why}")
                next_report += REPORT_SECONDS
            time.sleep(ASK_SECONDS)

    def _never_healthy(self, servers: Sequence[Step], text: str) -> Ending:
        ended = [server for server in servers if server.has_ended]
        self._end_servers(servers)
        if self._stop.number is not None:
            return Ending(STOPPED, EXIT_STOPPED, text)
        if not ended:
            return Ending(FAILED, EXIT_ERROR, text, None, servers[0].name)
        ends = [end for server in ended for end in server.ends()]
        lost = [end for server in ended for end in server.lost()]
        ending = judge([], ends, lost, unasked=ended[0].name, told=None)
        return Ending(FAILED, ending.code, f"{text}; {ending.text}", ending.first, ended[0].name)

    def _watch(self, servers: Sequence[Step], actor: Step) -> str:
        """Until the actor ends, a signal comes, or the last server ends, whose name comes back."""
        left = list(servers)
        while not actor.has_ended and self._stop.number is None:
            for server in [server for server in left if server.has_ended]:
                left.remove(server)
                if not left:
                    return server.name
                names = ", ".join(other.name for other in left)
                self._say(f"{server.name} has ended without being asked to; the run goes on with {names}")
            time.sleep(POLL_SECONDS)
        return ""

    def _end_all(self, servers: Sequence[Step], actor: Step, unasked: str) -> bool:
        """The actor first, which may still wait for rewards; whether it ended by itself."""
        by_itself = True
        for node in self._failed_nodes():
            step = history.newest_checkpoint(self._settings.run_dir)
            self._say(f"node {node} has failed: Slurm requeues the job, and it goes on from step {step}")
        if not actor.has_ended:
            why = f"{unasked} has ended without being asked to" if unasked else f"got {self._signal_name()}"
            if self._stop.number == signal.SIGTERM:
                why += " (the job is being cancelled, or requeued by somebody)"
            self._say(f"{why}; the actor is asked to save and to end")
            number = signal.SIGUSR1 if self._stop.number == signal.SIGUSR1 else signal.SIGTERM
            by_itself = actor.end(number, self._deadline())
            # Before the servers have ended, which a job that is cancelled may not live to see.
            step = history.newest_checkpoint(self._settings.run_dir)
            self._say(f"the actor has ended; the run's newest checkpoint is that of step {step}")
        self._end_servers(servers)
        return by_itself

    def _failed_nodes(self) -> list[str]:
        """Those that Slurm has given up while steps ran on them."""
        return sorted({step.failed_node for step in self._steps if step.failed_node is not None})

    def _deadline(self) -> float:
        """When whoever was asked to end is killed: in time for a requeue, where the end of the allocation is near."""
        seconds = self._settings.grace_seconds
        if self._stop.number == signal.SIGUSR1 and self._end_time is not None:
            seconds = max(self._end_time - REQUEUE_SECONDS - time.time(), LEAST_SECONDS)
        return time.monotonic() + seconds

    def _end_servers(self, servers: Sequence[Step]) -> None:
        deadline = self._deadline()
        for server in servers:
            if not server.has_ended:
                server.signal(signal.SIGTERM)  # all at once; `end` does it again where this one was lost
        for server in servers:
            server.end(signal.SIGTERM, deadline)

    def _signal_name(self) -> str:
        return signal.Signals(self._stop.number).name if self._stop.number is not None else ""

    def _close(self, attempt: Attempt, ending: Ending) -> int:
        """Say what happened, decide on a requeue, and keep both."""
        step = history.newest_checkpoint(self._settings.run_dir)
        if ending.log_of:
            self._say(last_lines(self._folder / f"{ending.log_of}.log"))
        self._say(ending.text)
        cancelled = self._stop.number is not None and self._stop.number != signal.SIGUSR1
        requeue, what = False, "nothing is left to do"
        if ending.kind != FINISHED:
            go_on = f"submit the same command again to go on from step {step}"
            decision = history.decide(
                restart=self._allocation.restart,
                max_restarts=self._settings.max_restarts,
                step_before=attempt.step_before,
                step_after=step,
            )
            if nodes := self._failed_nodes():
                what = (
                    f"Slurm itself requeues the job, since {' and '.join(nodes)} failed; it goes on from step {step}"
                )
            elif cancelled:
                what = f"not requeued after {self._signal_name()}; {go_on}"
            elif ending.code == EXIT_DIVERGED:
                what = "not requeued: the policy has diverged, and would again from the same checkpoint"
            elif ending.kind == FAILED and not self._settings.restart_after_crash:
                what = f"not requeued after a failure ({RESTART_AFTER_CRASH} is false); {go_on}"
            else:
                requeue = decision.requeue
                what = (
                    f"requeued: {decision.why}; Slurm waits about two minutes before"
                    if requeue
                    else f"not requeued: {decision.why}; {go_on}"
                )
        self._say(f"the run stands at step {step}, which was {attempt.step_before} when this attempt began; {what}")
        first = ending.first.name if ending.first else None
        closed = history.close(
            attempt,
            step_after=step,
            reason=ending.text,
            exit_code=ending.code,
            first_failed=first,
            requeued=requeue,
        )
        with contextlib.suppress(OSError):
            self._history.write(closed)
        if requeue:
            try:
                calls.requeue(self._allocation.job_id)
            except SlurmCallError as error:
                self._say(f"error: the job could not be requeued ({error}); submit the same command again")
                with contextlib.suppress(OSError):
                    self._history.write(replace(closed, requeued=False))
        return ending.code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; from a batch script."""
    stop = StopSignal()
    repository = Path(os.environ.get(REPOSITORY) or Path(__file__).resolve().parents[3])
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ, repository)
        allocation = read_allocation(settings, os.environ)
    except ConfigError as error:
        print(f"error: {error}", flush=True)
        return EXIT_ERROR
    try:
        return Job(settings, allocation, dict(os.environ), stop).run()
    except OSError as error:
        print(f"error: cannot work in {settings.run_dir}, the run's folder: {error}", flush=True)
    except SlurmCallError as error:
        print(f"error: Slurm does not answer: {error}", flush=True)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
