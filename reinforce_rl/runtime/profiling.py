"""Profile chosen steps: a trace per rank, memory on CUDA, and the top operations.

docs/debugging.md describes the files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.untrusted_files import read_json

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ProfileConfig

TOP_OPERATIONS = 30
# A larger trace is not written: reading it takes minutes, and no viewer opens it.
MAX_EVENTS = 1_000_000
LARGE_BYTES = 200e6  # size of a trace that viewers may refuse
ALLOCATIONS = 100_000


class StepProfiler:
    """Profiles the chosen steps of this rank; profiling ends after a failure, the run does not.

    Args:
        folder: `profile/` of the run.
        tell: shows a message.
    """

    def __init__(
        self,
        cfg: ProfileConfig,
        folder: Path,
        rank: int,
        device: torch.device,
        tell: Callable[[str], None],
    ):
        self._cfg = cfg
        self._folder = folder
        self._rank = rank
        self._tell = tell
        self._is_on_cuda = device.type == "cuda"
        self._step = 0
        self._is_open = False
        self._trace: torch.profiler.profile | None = None
        self._nvtx = contextlib.ExitStack()
        needs = "NVTX ranges" if cfg.tool == "nsys" else "memory snapshots" if cfg.memory else ""
        if needs and not self._is_on_cuda:
            tell(f"profile: {needs} need CUDA; none are made on a {device.type.upper()}")

    def start(self, step: int) -> None:
        """Start the profile of a step, if it is chosen."""
        cfg = self._cfg
        self._step = step
        self._is_open = step in cfg.steps and (cfg.ranks is None or self._rank in cfg.ranks)
        if not self._is_open:
            return
        with self._or_give_up():
            if cfg.tool == "torch":
                kinds = torch.profiler.ProfilerActivity
                wanted = {kinds.CPU, kinds.CUDA} if self._is_on_cuda else {kinds.CPU}
                # A torch without CUDA would warn at every operation.
                activities = wanted & torch.profiler.supported_activities()
                self._trace = torch.profiler.profile(
                    activities=activities, record_shapes=cfg.shapes, with_stack=cfg.stacks
                )
                self._trace.start()
                if self._is_on_cuda and cfg.memory:
                    # torch 2.13 documents this function, and has no public name for it.
                    torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
            elif self._is_on_cuda:
                torch.cuda.profiler.start()  # nsys --capture-range=cudaProfilerApi
                self._nvtx.callback(torch.cuda.profiler.stop)
                self._nvtx.enter_context(
                    torch.autograd.profiler.emit_nvtx(record_shapes=cfg.shapes)
                )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase in the trace or for nsys."""
        by_nsys = self._is_open and self._trace is None and self._is_on_cuda
        trace = (
            torch.profiler.record_function(f"phase: {name}")
            if self._trace
            else contextlib.nullcontext()
        )
        with torch.cuda.nvtx.range(name) if by_nsys else trace:
            yield

    def stop(self) -> None:
        """End the step's profile, if any, and write it."""
        self._is_open = False
        with self._or_give_up():
            self._nvtx.close()
            trace = self._trace
            self._trace = None
            if trace is not None:
                trace.stop()
                self._write(trace)

    def _write(self, trace: torch.profiler.profile) -> None:
        start = self._folder / f"step_{self._step:05d}" / f"rank_{self._rank}"
        start.parent.mkdir(parents=True, exist_ok=True)
        if self._is_on_cuda and self._cfg.memory:
            # See `start` for the underscores.
            torch.cuda.memory._dump_snapshot(f"{start}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        assert trace.profiler is not None and trace.profiler.kineto_results is not None
        events = len(trace.profiler.kineto_results.events())
        if events > MAX_EVENTS:
            advice = "profile a run with fewer or shorter responses"
            self._tell(
                f"profile: step {self._step} has {events:,} events, too many to be written; "
                f"{advice}"
            )
            return
        path = Path(f"{start}.trace.json.gz")
        part = Path(f"{start}.part.json.gz")
        trace.export_chrome_trace(str(part))
        part.replace(path)
        if (size := path.stat().st_size) > LARGE_BYTES:
            self._tell(f"profile: {path} has {size / 1e6:.0f} MB; a viewer may not open it")
        averages = trace.key_averages()
        key = f"self_{'device' if self._is_on_cuda else 'cpu'}_time_total"
        table = averages.table(sort_by=key, row_limit=TOP_OPERATIONS, max_name_column_width=80)
        write_atomically(Path(f"{start}.txt"), table)
        if self._rank == min(self._cfg.ranks or [0]):
            by_operation = [
                (getattr(average, key) / 1e6, average.key, average.count) for average in averages
            ]
            total = sum(seconds for seconds, *_ in by_operation)
            operations = [
                {
                    "name": name,
                    "calls": calls,
                    "self_seconds": seconds,
                    "share": seconds / total if total else 0.0,
                }
                for seconds, name, calls in sorted(by_operation, reverse=True)[:TOP_OPERATIONS]
            ]
            device = "cuda" if self._is_on_cuda else "cpu"
            self._add(
                {
                    "step": self._step,
                    "rank": self._rank,
                    "device": device,
                    "seconds": total,
                    "trace": f"{start.parent.name}/{path.name}",
                    "operations": operations,
                }
            )
            self._tell(f"profile: step {self._step} is in {start.parent}")

    def _add(self, step: dict[str, Any]) -> None:
        path = self._folder / "top_operations.json"
        past = read_json(path)["steps"] if path.is_file() else []
        steps = [*(entry for entry in past if entry["step"] != step["step"]), step]
        write_atomically(
            path,
            json.dumps({"steps": sorted(steps, key=lambda entry: entry["step"])}, indent=1) + "\n",
        )

    @contextlib.contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            trace = self._trace
            self._trace = None
            with contextlib.suppress(Exception), self._nvtx:
                if trace is not None:
                    trace.stop()
            self._cfg = self._cfg.model_copy(update={"steps": []})
            self._is_open = False
            self._tell(f"profile: given up ({type(error).__name__}: {error}); the run continues")
