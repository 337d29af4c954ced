"""The work queue: only the ranks that generate vary, also if a rank stops or fails."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engine_fake import install_fake
from helpers.ranks import reference
from helpers.rewards import FunctionReward
from helpers.tiny_run import metrics_of
from helpers.trainer_processes import TrainerProcesses, assert_equal_runs

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import Completions, Prompt, RolloutBatch
from reinforce_rl.errors import (
    EXIT_STOPPED,
    GenerationError,
    ReinforceError,
    RewardServerError,
    StoppedEarly,
)
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.scoring import RolloutScorer
from reinforce_rl.rollout.source import RolloutContext
from reinforce_rl.rollout.work_queue import COUNTER, WorkQueue
from reinforce_rl.runtime.stop import StopRequest

RANKS = 4
SAMPLES = 2
DEADLINE = 60.0
SHARES = [5, 4, 0, 3]  # prompts of each rank, two a micro-batch: 3 + 2 + 0 + 2
MICRO_BATCHES = 7
QUEUE = "trainer.reinforce.generation_work_queue=true"
TRTLLM = "generation=tensorrt_llm"


class Threads:
    """State that ranks, which are threads here, share."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=DEADLINE)
        self.lock = threading.Lock()
        self.values: list[Any] = [None] * RANKS
        self.counts: dict[str, int] = {}


class ThreadMesh:
    """The part of a `Mesh` that rollouts use."""

    is_model_parallel_rank_0 = True
    world_size = RANKS
    dp_size = RANKS

    def __init__(self, rank: int, threads: Threads):
        self.rank = rank
        self.dp_rank = rank
        self.is_main = rank == 0
        self._threads = threads

    def gather_over_dp(self, value: Any) -> list[Any]:
        self._threads.values[self.rank] = value
        self._threads.barrier.wait()
        gathered = list(self._threads.values)
        self._threads.barrier.wait()
        return gathered

    def sum_over_dp(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather_over_dp(values)).sum(dim=0)

    def any_rank(self, flag: bool) -> bool:
        return any(self.gather_over_dp(flag))

    def from_model_parallel_rank_0(self, value: Any) -> Any:
        return value

    def from_main(self, value: Any) -> Any:
        return self.gather_over_dp(value)[0]

    def raise_if_any(self, error: Exception | None) -> None:
        for failure in self.gather_over_dp(error):
            if failure is not None:
                raise error or type(failure)("another rank failed")

    raise_on_all_ranks = Mesh.raise_on_all_ranks

    def reset_count(self, name: str) -> None:
        self._threads.counts.pop(name, None)

    def count(self, name: str, by: int = 1) -> int:
        with self._threads.lock:
            self._threads.counts[name] = self._threads.counts.get(name, 0) + by
            return self._threads.counts[name]

    count_by_block = count


class FakeModel:
    """Responses depend on prompt, sample and seed; `before` is called with the number of the call.

    Log-probs name the rank that generated.
    """

    pad_id = 0
    settings = SimpleNamespace(seed=0, reinforce=SimpleNamespace(skip_special_tokens=False))
    sampling = SimpleNamespace(stop_token_ids=())
    tokenizer = SimpleNamespace(
        batch_decode=lambda rows, **_: [str(row) for row in rows], pad_token_id=0
    )

    def __init__(self, mesh: ThreadMesh, before: Callable[[int], None]):
        self.mesh = mesh
        self.calls = 0
        self._before = before
        self.generator = SimpleNamespace(awake=threading.Lock)

    def infer(
        self, prompts: list[Prompt], samples: int, seed: int, *, validation: bool = False
    ) -> Completions:
        self.calls += 1
        self._before(self.calls)
        rows = []
        for prompt in prompts:
            for sample in range(samples):
                length = 1 + (prompt.id + sample) % 3
                rows.append([seed + prompt.id] * length)
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        made_by = torch.full(tokens.shape, float(self.mesh.rank))
        return Completions(tokens, lengths, ("stop",) * len(rows), made_by)


class FailingReward(FunctionReward):
    """Fails once the score of the prompt with this id is requested."""

    def __init__(self, of: int | None):
        super().__init__(lambda ids: ids[0] + len(ids) / 10, 1)
        self._of = of

    def infer_rm(self, request: Any) -> Any:
        if self._of is not None and self._of in request.tokens[:, 0].tolist():
            return SimpleNamespace(result=self._fail)
        return super().infer_rm(request)

    def _fail(self) -> None:
        raise RewardServerError("no answer")


def two_by_two(prompts: list[Prompt], validation: bool) -> Iterator[list[Prompt]]:
    for first in range(0, len(prompts), 2):
        yield prompts[first : first + 2]


Outcome = tuple[RolloutBatch | None, int, Exception | None]


class Phases:
    """Generation phases in sequence, on ranks that are threads."""

    def __init__(self):
        self.threads = Threads()
        self._stops = [StopRequest() for _ in range(RANKS)]

    def run(
        self,
        *,
        queue: bool = True,
        before: Callable[[int, int, StopRequest], None] = lambda *_: None,
        failing_reward: int | None = None,
    ) -> list[Outcome]:
        """Return the batch, the number of micro-batches and the error of each rank.

        `before` gets the rank and the number of the call.
        """

        def of_rank(rank: int) -> Outcome:
            mesh = ThreadMesh(rank, self.threads)
            stop = self._stops[rank]
            model: Any = FakeModel(mesh, lambda call: before(rank, call, stop))
            first = 10 + sum(SHARES[:rank])
            ids = range(first, first + SHARES[rank])
            prompts = [Prompt(i, str(i), (i,)) for i in ids]
            rm = FailingReward(failing_reward)
            cut = two_by_two
            cfg = ReinforceConfig(generation_work_queue=queue)
            no_steps = (None, None)
            context = RolloutContext(cfg, model, rm, cut, *no_steps, stop)  # type: ignore[arg-type]
            try:
                pending = LocalRollouts(context).sample(prompts, SAMPLES, step=7)
                batch = RolloutScorer(context).score(pending, "step 1")
                return batch, model.calls, None
            except ReinforceError as error:
                return None, model.calls, error
            except BaseException:
                self.threads.barrier.abort()
                raise

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(of_rank, range(RANKS)))

    def all_taken(self) -> None:
        """Wait until nothing is left to take."""
        deadline = time.monotonic() + DEADLINE
        while max(self.threads.counts.values(), default=0) <= MICRO_BATCHES:
            assert time.monotonic() < deadline, "nobody takes what is left"
            time.sleep(0.002)


def assert_equal_batches(outcomes: list[Outcome], expected: list[Outcome]) -> None:
    for rank in range(RANKS):
        batch, _, _ = outcomes[rank]
        other, _, _ = expected[rank]
        assert batch is not None
        assert other is not None
        assert len(batch.rewards) == SAMPLES * SHARES[rank]
        assert batch.finish_reasons == other.finish_reasons
        for name in (
            "sequences",
            "prompt_lengths",
            "response_lengths",
            "group_ids",
            "sample_ids",
            "rewards",
            "valid",
        ):
            assert torch.equal(getattr(batch, name), getattr(other, name)), name


@pytest.fixture(scope="module")
def fixed() -> list[Outcome]:
    outcomes = Phases().run(queue=False)
    num_calls = [calls for _, calls, _ in outcomes]
    assert num_calls == [3, 2, 0, 2]
    return outcomes


@pytest.mark.parametrize("slow", range(RANKS))
def test_the_others_take_what_a_slow_rank_leaves_and_it_comes_back(slow, fixed):
    phases = Phases()
    for _ in range(2):  # the second phase has a new queue
        outcomes = phases.run(before=lambda rank, *_: phases.all_taken() if rank == slow else None)
        calls = [calls for _, calls, _ in outcomes]
        assert calls[slow] <= 1
        assert sum(calls) == MICRO_BATCHES
        assert_equal_batches(outcomes, fixed)


def test_samples_were_made_elsewhere_and_scores_were_asked_for_there(fixed):
    """Rank 2 has no prompts and generates nearly everything."""
    phases = Phases()
    outcomes = phases.run(before=lambda rank, *_: None if rank == 2 else phases.all_taken())
    assert outcomes[2][1] >= MICRO_BATCHES - RANKS + 1
    makers = []
    for batch, _, _ in outcomes:
        if len(batch.rewards):
            made_by = set(batch.generator_log_probs.unique().tolist())
            makers.append(made_by)
            if len(made_by) > 1:
                assert 2.0 in made_by
    assert 2.0 in set.union(*makers)
    assert_equal_batches(outcomes, fixed)


def test_a_rank_that_stops_leaves_no_work_to_the_others():
    """It gets the request to stop in its first call, while the others are in theirs."""

    def ask(rank: int, call: int, stop: StopRequest) -> None:
        if rank == 0:
            stop.reason = "SIGTERM"
        else:
            phases.all_taken()  # which the stop causes

    phases = Phases()
    outcomes = phases.run(before=ask)
    kinds = [type(error) for _, _, error in outcomes]
    assert kinds == [StoppedEarly] * RANKS
    for _, calls, _ in outcomes:
        assert calls <= 1


def test_an_engine_that_fails_ends_the_phase_on_all_ranks(fixed):
    def fail(rank: int, call: int, stop: StopRequest) -> None:
        if rank == 1:
            raise GenerationError("the engine is dead")
        phases.all_taken()

    phases = Phases()
    outcomes = phases.run(before=fail)
    kinds = [type(error) for _, _, error in outcomes]
    assert kinds == [GenerationError] * RANKS
    for _, calls, _ in outcomes:
        assert calls <= 1
    assert_equal_batches(phases.run(), fixed)  # leftovers of the failed phase are ignored


@pytest.mark.parametrize("prompt", [10, 21])
def test_scores_that_fail_end_the_phase_on_all_ranks(prompt, fixed):
    """It does not matter which rank requested them."""
    phases = Phases()
    outcomes = phases.run(failing_reward=prompt)
    kinds = [type(error) for _, _, error in outcomes]
    assert kinds == [RewardServerError] * RANKS
    assert sum(calls for _, calls, _ in outcomes) == MICRO_BATCHES
    assert_equal_batches(phases.run(), fixed)


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


ONE_BY_ONE = (
    "model.reinforce.rollout_micro_batch_size=1",
    "model.reinforce.val_rollout_micro_batch_size=1",
)
# Ten prompts. Of two ranks a step's shares are 3 and 4, in micro-batches of two, and the last
# step's 1 and 2.
TWO = (2, ("model.reinforce.num_rollout_samples=7", "model.reinforce.rollout_micro_batch_size=2"))
# Of four ranks 2, 2, 2, 3, and the last step has one prompt.
FOUR = (4, ("model.reinforce.num_rollout_samples=9", "trainer.reinforce.max_epochs=1", *ONE_BY_ONE))
TP2 = (
    4,
    ("model.reinforce.num_rollout_samples=7", "model.tensor_model_parallel_size=2", *ONE_BY_ONE),
)
FILTERING = (
    2,
    (
        "trainer.reinforce.dynamic_filtering=true",
        "trainer.reinforce.max_resampling_rounds=2",
        *ONE_BY_ONE,
    ),
)
SETTINGS = (
    "trainer.reinforce.max_epochs=2",
    "trainer.reinforce.val_check_interval=2",
    "trainer.reinforce.save_interval=1",
    "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
)


def finish(
    processes: TrainerProcesses, folder: Path, ranks: int, *overrides: str, **options: Any
) -> None:
    processes.start(folder, *SETTINGS, *overrides, ranks=ranks, **options)
    assert processes.wait() == 0, (folder / "log").read_text()


def taken(folder: Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield the rank, its micro-batches, their total, and those of its own prompts.

    One row for each phase and rank.
    """
    pattern = re.compile(r"queue: rank (\d) took (\d+) of (\d+), its own (\d+)")
    for match in pattern.finditer((folder / "log").read_text()):
        yield tuple(map(int, match.groups()))  # type: ignore[misc]


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "slow"),
    [
        pytest.param(TWO, 1, id="two ranks"),
        pytest.param(FOUR, 3, id="four ranks", marks=pytest.mark.slow),
        pytest.param(FILTERING, 0, id="dynamic filtering"),
        pytest.param(TP2, 2, id="two blocks of two", marks=pytest.mark.slow),
    ],
)
def test_runs_are_those_of_the_fixed_split(case, slow, processes, tmp_path):
    """One rank takes a single micro-batch of a phase.

    Metrics, samples, weights and checkpoints are the same.
    """
    ranks, overrides = case
    fixed = tmp_path / "fixed"
    queued = tmp_path / "queued"
    finish(processes, fixed, ranks, *overrides)
    finish(processes, queued, ranks, *overrides, QUEUE, patches=[[reference(slow_down), slow]])
    assert_equal_runs(queued, fixed)
    assert_the_slow_rank_took_one_each(queued, ranks, slow, block=2 if case is TP2 else 1)


def slow_down(slow: int) -> None:
    """Let a rank finish its first micro-batch after the others have taken all remaining ones.

    Every rank prints the number of micro-batches that it took.
    """
    rank = int(os.environ["RANK"])
    take = WorkQueue.__iter__

    def take_slowly(queue: WorkQueue):
        taken = 0
        deadline = time.monotonic() + DEADLINE
        for micro_batch in take(queue):
            taken += 1
            while (
                rank == slow
                and queue._shared
                and queue._mesh.count(COUNTER, 0) <= len(queue._micro_batches)
            ):
                assert time.monotonic() < deadline
                time.sleep(0.002)
            yield micro_batch
        print(
            f"queue: rank {rank} took {taken} of {len(queue._micro_batches)}, "
            f"its own {len(queue._own)}",
            flush=True,
        )

    WorkQueue.__iter__ = take_slowly  # type: ignore[method-assign]


def fake_engines(folder: Path, faults: dict[str, dict] | None = None) -> list[Any]:
    """Return a patch: TensorRT-LLM is the fake, with faults by rank and records below `folder`."""
    return [reference(use_fake_engine), str(folder / "engines"), faults or {}]


def use_fake_engine(folder: str, faults: dict[str, dict]) -> None:
    rank = os.environ["RANK"]
    install_fake(Path(folder) / rank, **faults.get(rank, {}))


def assert_the_slow_rank_took_one_each(
    queued: Path, ranks: int, slow: int, *, block: int = 1
) -> None:
    phases = list(taken(queued))
    of_slow = [phase for phase in phases if phase[0] == slow]
    leaders = len({rank for rank, *_ in phases})
    assert leaders == ranks
    assert len(phases) == ranks * len(of_slow) > len(metrics_of(queued))
    for _, number, _, _ in of_slow:
        assert number <= 1
    assert any(local > 1 for _, _, _, local in of_slow), "which the others took"
    num_taken = sum(number for _, number, _, _ in phases)
    assert num_taken == block * sum(total for _, _, total, _ in of_slow)


@pytest.mark.slow
@pytest.mark.timeout(900)  # eight engines
def test_engines_take_what_a_slow_rank_leaves(processes, tmp_path):
    """Four ranks on the fake TensorRT-LLM, with an engine each."""
    ranks, overrides = FOUR
    slow = 3
    fixed = tmp_path / "fixed"
    queued = tmp_path / "queued"
    finish(processes, fixed, ranks, *overrides, TRTLLM, patches=[fake_engines(fixed)])
    patches = [[reference(slow_down), slow], fake_engines(queued)]
    finish(processes, queued, ranks, *overrides, TRTLLM, QUEUE, patches=patches)
    assert_equal_runs(queued, fixed)
    assert_the_slow_rank_took_one_each(queued, ranks, slow)
    split = calls_of(fixed, "BaseLLM.generate_async")
    asked = calls_of(queued, "BaseLLM.generate_async")
    assert sum(asked) == sum(split)
    assert asked[slow] < split[slow]


@pytest.mark.slow
@pytest.mark.timeout(900)  # five engines
def test_an_engine_that_dies_is_started_anew_while_the_other_rank_generates(processes, tmp_path):
    """It dies after step 1, so the new engine needs the trained weights and repeats the samples."""
    ranks, overrides = TWO
    fixed = tmp_path / "fixed"
    queued = tmp_path / "queued"
    finish(processes, fixed, ranks, *overrides, TRTLLM, patches=[fake_engines(fixed)])
    # Rank 1 answers nearly all requests: up to 31 until the first update, and at least 48
    # altogether.
    faults = {"1": {"fault": "die", "after": 31}}
    patches = [[reference(slow_down), 0], fake_engines(queued, faults)]
    finish(processes, queued, ranks, *overrides, TRTLLM, QUEUE, patches=patches)
    assert_equal_runs(queued, fixed)
    assert calls_of(queued, "AsyncLLM.setup_async") == [1, 2]


def calls_of(folder: Path, name: str) -> list[int]:
    """Return how often each rank's fake engine got this call."""
    counts = []
    for path in sorted((folder / "engines").glob("*/calls.txt")):
        calls = [line for line in path.read_text().splitlines() if line.startswith(f"{name} ")]
        counts.append(len(calls))
    return counts


@pytest.mark.slow
def test_a_run_that_was_stopped_in_generation_goes_on(processes, tmp_path):
    """Rank 1 gets the signal and saves with rank 0; a run without the queue has the same steps."""
    ranks, overrides = TWO
    fixed = tmp_path / "fixed"
    queued = tmp_path / "queued"
    finish(processes, fixed, ranks, *overrides)
    act = {"phase": "generate", "step": 3, "signal": signal.SIGTERM, "rank": 1}
    processes.start(queued, *SETTINGS, *overrides, QUEUE, ranks=ranks, patience=30, act=act)
    assert processes.wait() == EXIT_STOPPED, (queued / "log").read_text()
    assert processes.statuses == [EXIT_STOPPED] * ranks
    assert metrics_of(queued)[-1]["step"] == 2
    finish(processes, queued, ranks, *overrides, QUEUE, patches=[[reference(slow_down), 0]])
    assert_equal_runs(queued, fixed)
