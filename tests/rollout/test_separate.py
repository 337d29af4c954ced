"""Generators as separate processes.

A generator that dies, stalls, leaves or joins changes no number.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import check_fault, printed_keys
from helpers.ranks import reference
from helpers.slow_generation import generating
from helpers.tiny_run import metrics_of, rollouts_of, tiny_config, tiny_overrides, without_times
from helpers.trainer_processes import (
    NUM_PROMPTS,
    RUN_SECONDS,
    SETTINGS,
    STEPS,
    TrainerProcesses,
    assert_equal_runs,
    assert_sound,
)

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import ConfigError, GenerationError, RewardServerError
from reinforce_rl.monitoring.records import read_tokens
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rollout.generator_pool import GeneratorPool, _Generator
from reinforce_rl.rollout.generator_rank import GeneratorRank
from reinforce_rl.rollout.message_codec import decode, encode
from reinforce_rl.rollout.messages import (
    Dismissed,
    GenerationRequest,
    GenerationRequests,
    GenerationResult,
    GeneratorFailed,
    NewWeights,
    Received,
    Register,
    RequestCredit,
    ResultBounds,
    RunEnded,
)
from reinforce_rl.rollout.rendezvous import RENDEZVOUS_FILE
from reinforce_rl.rollout.weight_group import ElasticWeightGroup
from reinforce_rl.runtime.status import read_status
from reinforce_rl.trainer.reinforce import ReinforceTrainer

SLOW = pytest.mark.slow
JOINED = ("placement=disaggregated", "generation_ranks=1")
SEPARATE = ("placement=disaggregated", "generation_ranks=0", "generator_timeout_seconds=60")
FINISHED = ("rollout_order=finished",)
PATIENT = "trainer.heartbeat_timeout_seconds=60"


def die_receiving(transfer: int) -> None:
    """Kill this generator before it receives its Nth weights."""
    broadcast = ElasticWeightGroup.broadcast
    calls = itertools.count(1)

    def die(group: ElasticWeightGroup, tensor):
        if next(calls) == transfer:
            os.kill(os.getpid(), signal.SIGKILL)
        return broadcast(group, tensor)

    ElasticWeightGroup.broadcast = die  # type: ignore[method-assign]


def await_generators(training: int, count: int) -> None:
    """Let the Nth training wait until `count` generators have registered."""
    train = ReinforceTrainer.run_training
    register = GeneratorPool._register
    trainings = itertools.count(1)
    come = []

    def note_registration(pool: GeneratorPool, rank: int, registration):
        register(pool, rank, registration)
        come.append(rank)

    def wait_and_train(*args):
        deadline = time.monotonic() + RUN_SECONDS
        is_it = next(trainings) == training
        while is_it and len(come) < count:
            assert time.monotonic() < deadline, "they do not come"
            time.sleep(0.05)
        return train(*args)

    GeneratorPool._register = note_registration  # type: ignore[method-assign]
    ReinforceTrainer.run_training = wait_and_train  # type: ignore[method-assign]


def awaiting(training: int, count: int) -> list[Any]:
    return [reference(await_generators), training, count]


# each of two generators has requests at each step
BUSY: dict[str, Any] = {"patches": [generating(0.3)]}


class Programs:
    """Trainers and generators of one folder, as processes."""

    def __init__(self, folder: Path, processes: TrainerProcesses, others: TrainerProcesses):
        self.folder = folder
        self._processes = processes
        self._others = others
        self.generators: list[int] = []
        self.trainers: list[int] = []

    def generate(self, *overrides: str, ranks: int = 1, **options: object) -> Path:
        """Start a generator; return its log."""
        self.folder.mkdir(exist_ok=True)
        log = self.folder / f"generator-{len(self.generators)}"
        base = tiny_overrides(self.folder, num_prompts=NUM_PROMPTS)
        command = [
            str(log),
            {"generates": True, **options},
            ranks,
            *base,
            *SETTINGS,
            *SEPARATE,
            *overrides,
        ]
        self._others._process.stdin.write(json.dumps(command) + "\n")  # type: ignore[union-attr]
        self.generators += map(int, self._others._answer().split())
        return log

    def train(self, *overrides: str, ranks: int = 1, **options: Any) -> list[int]:
        self.trainers = self._processes.start(
            self.folder, *SETTINGS, *SEPARATE, *overrides, ranks=ranks, **options
        )
        return self.trainers

    def wait(self) -> int:
        self.trainers = []
        return self._processes.wait()

    @property
    def said(self) -> str:
        log = self.folder / "log"
        return log.read_text() if log.is_file() else ""

    @property
    def of_generators(self) -> str:
        logs = sorted(self.folder.glob("generator-*"))
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs)

    def wait_for(self, condition: Callable[[], bool], message: str) -> None:
        deadline = time.monotonic() + RUN_SECONDS / 2
        while not condition():
            logs = f"{self.said}\n{self.of_generators}"
            assert time.monotonic() < deadline, f"{message}:\n{logs}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        self.wait_for(
            lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") > step,
            f"no step {step}",
        )

    def wait_for_loss(self) -> None:
        def waits() -> bool:
            before, _, after = self.said.rpartition(" died: ")
            return bool(before) and "Waiting for a generator" in after

        self.wait_for(waits, "it does not wait")

    def close(self) -> None:
        for process in [*self.generators, *self.trainers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.trainers:
            self.wait()


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[TrainerProcesses, TrainerProcesses]]:
    with (
        contextlib.closing(TrainerProcesses()) as trainers,
        contextlib.closing(TrainerProcesses()) as generators,
    ):
        yield trainers, generators


@pytest.fixture
def programs(
    processes: tuple[TrainerProcesses, TrainerProcesses], tmp_path: Path
) -> Iterator[Programs]:
    programs = Programs(tmp_path / "separate", *processes)
    yield programs
    programs.close()


@pytest.fixture(scope="module")
def joined(
    processes: tuple[TrainerProcesses, TrainerProcesses], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run without faults, whose generator is a rank of its job."""
    folder = tmp_path_factory.mktemp("joined")
    processes[0].start(folder, *SETTINGS, *JOINED, ranks=2)
    assert processes[0].wait() == 0, (folder / "log").read_text()
    return folder


def ended(log: Path, status: int) -> bool:
    return log.read_text().endswith(f"exit status {status}\n")


@pytest.mark.more
def test_one_is_killed_another_comes_and_no_number_changes(programs, joined):
    """The first dies at step 4.

    The third joins, and is alone from step 10 on, when the second dies.
    """
    programs.generate(
        act={"rank": 0, "phase": "generate", "step": 4, "signal": signal.SIGKILL}, **BUSY
    )
    programs.generate(
        act={"rank": 0, "phase": "generate", "step": 10, "signal": signal.SIGKILL}, **BUSY
    )
    (process,) = programs.train(step_seconds=0.5, patches=[awaiting(7, 3)])
    programs.wait_for_step(4)
    third = programs.generate(**BUSY)
    assert programs.wait() == 0, programs.said
    said = programs.said
    assert said.count(" has registered\n") == 3
    for lost in programs.generators[:2]:
        assert (
            f"process {lost} died: its connection is closed; 1 of its micro-batches go to others"
            in said
        )
    assert "No generator has the weights" not in said
    assert f"process {programs.generators[2]} died" not in said
    programs.wait_for(lambda: ended(third, 0), third.read_text())
    assert not (programs.folder / "run" / RENDEZVOUS_FILE).exists()
    status = read_status(programs.folder / "run")
    assert status is not None
    assert status.pid == process  # the trainer's process has not been replaced
    assert_equal_runs(programs.folder, joined)


@pytest.mark.parametrize("transfer", [1, 3])
@pytest.mark.slow
def test_a_death_as_weights_come(transfer, programs, joined):
    """The trainers continue at once, and the other generators get the weights again."""
    programs.generate(PATIENT)
    programs.generate(PATIENT, patches=[[reference(die_receiving), transfer]])
    programs.train(PATIENT, patches=[awaiting(1, 2)])
    began = time.monotonic()
    assert programs.wait() == 0, programs.said
    assert time.monotonic() - began < 50, "no timeout was waited for"
    assert f"process {programs.generators[1]} died" in programs.said
    assert_equal_runs(programs.folder, joined)


@pytest.mark.slow
def test_one_that_stands_still_is_lost_and_leaves_when_it_wakes(programs, joined):
    silent = "trainer.heartbeat_timeout_seconds=5"
    act = {"rank": 0, "phase": "generate", "step": 3, "signal": signal.SIGSTOP}
    log = programs.generate(silent, act=act, **BUSY)
    programs.generate(silent, **BUSY)
    programs.train(silent, step_seconds=1.0, patches=[awaiting(1, 2)])
    programs.wait_for(lambda: "sent no heartbeat" in programs.said, "nobody noticed it")
    os.kill(programs.generators[0], signal.SIGCONT)
    programs.wait_for(lambda: ended(log, 76), log.read_text())
    keys = set(printed_keys(log.read_text()))
    assert keys & {"generators.generator.sent_away", "generators.trainers.lost"}
    assert "Traceback" not in log.read_text()
    assert programs.wait() == 0, programs.said
    assert_equal_runs(programs.folder, joined)


@pytest.mark.slow
def test_one_that_is_stopped_ends_what_it_has_under_way(programs, joined):
    log = programs.generate(patches=[generating(0.3)])
    programs.generate()
    programs.train(step_seconds=0.3, patches=[awaiting(1, 2)])
    programs.wait_for_step(2)
    os.kill(programs.generators[0], signal.SIGTERM)
    programs.wait_for(lambda: ended(log, 75), log.read_text())
    assert printed_keys(log.read_text()) == ["generators.generator.stopped"]
    assert "SIGTERM" in log.read_text()
    assert programs.wait() == 0, programs.said
    assert "Traceback" not in log.read_text()
    assert_equal_runs(programs.folder, joined)


@pytest.mark.more
def test_without_a_generator_the_run_is_saved_and_goes_on_later(programs, joined):
    """All weights of the step before are lost, so one step uses newer ones than otherwise."""
    short = "generator_timeout_seconds=4"
    programs.generate(act={"rank": 0, "phase": "generate", "step": 5, "signal": signal.SIGKILL})
    programs.train(short, step_seconds=0.3)
    programs.wait_for_loss()
    status = read_status(programs.folder / "run")
    assert status is not None
    assert status.state == "running"
    assert (
        status.reason == "Waiting for a generator to register (`reinforce-rl generate`), up to 4 s"
    )
    assert programs.wait() == 1
    assert printed_keys(programs.said) == ["generators.generator.missing"]
    status = read_status(programs.folder / "run")
    assert status is not None
    for value in ("4 s", "generator_timeout_seconds", f"process {programs.generators[0]}"):
        assert value in status.reason
    assert "Traceback" not in programs.said
    saved = int((programs.folder / "run" / "checkpoints" / "latest").read_text().strip()[5:])
    assert 3 <= saved < 5
    assert saved == len(metrics_of(programs.folder)) - 1
    programs.generate()
    programs.train()
    assert programs.wait() == 0, programs.said
    ages = [line["train/staleness"] for line in metrics_of(programs.folder)[1:]]
    assert ages == [0.0] + [1.0] * (saved - 1) + [0.0] + [1.0] * (STEPS - saved - 1)


@pytest.mark.more
def test_a_lone_newcomer_answers_with_the_oldest_weights_that_there_are(programs):
    programs.generate(act={"rank": 0, "phase": "generate", "step": 5, "signal": signal.SIGKILL})
    programs.train(step_seconds=0.3)
    programs.wait_for_loss()
    done = len(metrics_of(programs.folder)) - 1
    programs.generate()
    assert programs.wait() == 0, programs.said
    assert (
        f"No generator has the weights after step {done - 1} any longer: prompts of step "
        in programs.said
    )
    assert "A generator is available" in programs.said
    lines = metrics_of(programs.folder)[1:]
    assert len(lines) == STEPS
    for line in lines:
        step = line["step"]
        assert line["train/staleness"] <= 1.0
        tokens = read_tokens(programs.folder / "run" / "rollouts" / f"step_{step:05d}.parquet")
        versions = {version for response in tokens for version in response.weight_versions or []}
        assert versions <= {max(0, step - 2), step - 1}
    assert {rollouts_of(programs.folder, STEPS)[0]["step"]} == {STEPS}


@pytest.mark.more
def test_a_signal_to_the_trainers_saves_the_rollouts_under_way(programs, joined):
    programs.generate(patches=[generating(0.2)])
    (process,) = programs.train(patience=60)
    programs.wait_for_step(4)
    os.kill(process, signal.SIGTERM)
    assert programs.wait() == 75, programs.said
    newest = programs.folder / "run" / "checkpoints"
    assert (newest / (newest / "latest").read_text().strip() / "rollouts.pt").is_file()
    programs.generate()
    programs.train()
    assert programs.wait() == 0, programs.said
    for line, other in zip(metrics_of(programs.folder), metrics_of(joined), strict=True):
        assert without_times(line) == without_times(other)
    for step in range(1, STEPS + 1):
        assert rollouts_of(programs.folder, step) == rollouts_of(joined, step)


@SLOW
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_generator_of_two_ranks_dies_as_a_whole(trainers, programs, joined):
    shared = ("generation_tensor_parallel_size=2", f"trainer.devices={trainers}")
    act = {"rank": 1, "phase": "generate", "step": 4, "signal": signal.SIGKILL}
    log = programs.generate(*shared, ranks=2, act=act, **BUSY)
    programs.generate(*shared, ranks=2, **BUSY)
    programs.train(*shared, ranks=trainers)
    assert programs.wait() == 0, programs.said
    assert " died" in programs.said
    assert programs.said.count(" has registered\n") == 2
    is_sent_away = "generators.generator.sent_away" in printed_keys(log.read_text())
    assert is_sent_away or "rank 1 (host " in log.read_text()
    steps = [line["step"] for line in metrics_of(programs.folder)]
    assert steps == list(range(STEPS + 1))


class TestWhatIsFinishedFirst:
    """Generators come and go: each prompt is trained on once an epoch, and no token is too old."""

    IN_FLIGHT = (*FINISHED, "inflight_updates=recompute")

    @SLOW
    @pytest.mark.parametrize("settings", [FINISHED, (*FINISHED, "inflight_updates=keep")])
    def test_one_is_killed_and_another_comes(self, settings, programs):
        programs.generate(
            *settings,
            act={"rank": 0, "phase": "generate", "step": 4, "signal": signal.SIGKILL},
            **BUSY,
        )
        programs.generate(*settings, **BUSY)
        programs.train(*settings, step_seconds=0.5, patches=[awaiting(1, 2)])
        programs.wait_for_step(4)
        third = programs.generate(*settings)
        assert programs.wait() == 0, programs.said
        assert f"process {programs.generators[0]} died" in programs.said
        programs.wait_for(lambda: ended(third, 0), third.read_text())
        assert_sound(programs.folder, one_version=settings == FINISHED)

    @pytest.mark.more
    def test_alone_when_it_dies_the_next_one_goes_on(self, programs):
        programs.generate(
            *self.IN_FLIGHT,
            act={"rank": 0, "phase": "generate", "step": 5, "signal": signal.SIGKILL},
        )
        programs.train(*self.IN_FLIGHT, step_seconds=0.3)
        programs.wait_for_loss()
        programs.generate(*self.IN_FLIGHT)
        assert programs.wait() == 0, programs.said
        assert_sound(programs.folder)

    @SLOW
    def test_one_that_is_stopped_gives_back_what_is_finished(self, programs):
        log = programs.generate(*self.IN_FLIGHT, **BUSY)
        programs.generate(*self.IN_FLIGHT, **BUSY)
        programs.train(*self.IN_FLIGHT, step_seconds=0.3, patches=[awaiting(1, 2)])
        programs.wait_for_step(2)
        os.kill(programs.generators[0], signal.SIGTERM)
        programs.wait_for(lambda: ended(log, 75), log.read_text())
        assert programs.wait() == 0, programs.said
        assert_sound(programs.folder)

    @SLOW
    def test_a_generator_of_two_ranks(self, programs):
        shared = (*self.IN_FLIGHT, "generation_tensor_parallel_size=2")
        act = {"rank": 1, "phase": "generate", "step": 4, "signal": signal.SIGKILL}
        programs.generate(*shared, ranks=2, act=act, **BUSY)
        programs.generate(*shared, ranks=2, **BUSY)
        programs.train(*shared, patches=[awaiting(1, 4)])
        assert programs.wait() == 0, programs.said
        assert " died" in programs.said
        assert_sound(programs.folder)


@pytest.mark.more
def test_other_settings_are_refused(programs):
    log = programs.generate("model.seed=77")
    programs.generate()
    programs.train("trainer.reinforce.max_steps=2")
    assert programs.wait() == 0, programs.said
    assert ended(log, 76)
    assert printed_keys(log.read_text()) == ["generators.generator.sent_away"]
    assert "model.seed is 77, " in log.read_text()


@pytest.mark.parametrize(
    ("overrides", "key", "named"),
    [
        (
            [*SEPARATE, "generator_timeout_seconds=0"],
            "config.value.out_of_range",
            ["generator_timeout_seconds"],
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides, key, named, tmp_path):
    with pytest.raises(ConfigError) as error:
        tiny_config(tmp_path, *overrides)
    check_fault(error.value.faults, key, *named)


@pytest.mark.parametrize(
    ("overrides", "is_external"),
    [
        ([], False),
        (["placement=disaggregated"], True),
        (["placement=disaggregated", "generation_tensor_parallel_size=2"], True),
        (["placement=disaggregated", "generation_ranks=1"], False),
    ],
)
def test_generators_register_where_no_rank_of_the_job_generates(overrides, is_external, tmp_path):
    cfg = tiny_config(tmp_path, "trainer.devices=2", *overrides)
    assert cfg.uses_external_generators == is_external
    assert cfg.training_ranks == 2 - cfg.generation_ranks


def test_no_generator_registers_where_ranks_of_the_job_generate(tmp_path):
    settings = [*tiny_overrides(tmp_path), *JOINED, "trainer.devices=2"]
    command = [sys.executable, "-m", "reinforce_rl", "generate", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert printed_keys(done.stderr) == ["generate.trainers.no_external_generators"]
    assert "generation_ranks is 1" in done.stderr


class Sent:
    """Links that record what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, GenerationRequest]] = []
        self.dismissed: list[int] = []

    def send(self, rank: int, *parts: bytes) -> None:
        if isinstance(message := decode(parts), GenerationRequests):
            self.messages += [(rank, request) for request in message.requests]
        elif isinstance(message, Dismissed):
            self.dismissed.append(rank)

    def versions(self) -> list[tuple[int, int, int]]:
        """Return the generator, the number and the version of each request."""
        return [(rank // 4096, request.number, request.version) for rank, request in self.messages]


def pool_of(staleness: int, generators: Sequence[tuple[int, int, int]]) -> tuple[Any, Sent]:
    """A pool without connections, of idle generators (number, first version, newest version)."""
    pool: Any = object.__new__(GeneratorPool)
    sent = Sent()
    pool._begin_empty(ResultBounds(vocab_size=32, max_length=8))
    pool._role = None
    pool._links = sent
    pool._staleness = staleness
    pool._settings = {"seed": 1}
    pool._newest = 3
    pool.group = SimpleNamespace(abandon=lambda *_: None)
    pool._generators = {}
    for number, since, version in generators:
        generator = _Generator(number, 1, f"g{number}", {number * 4096}, is_ready=True)
        generator.since = since
        generator.version = version
        pool._generators[number] = generator
    pool._idle = deque(pool._generators)
    return pool, sent


def requests(*versions: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(number, number + 1, version, (), 1, 7)
        for number, version in enumerate(versions)
    ]


def request_for(version: int, *, allow_newer: bool = False) -> GenerationRequest:
    prompts = (Prompt(7, "hi", (3,)),)
    return GenerationRequest(0, 1, version, prompts, 1, 7, allow_newer=allow_newer)


def test_work_goes_to_who_has_its_weights():
    pool, sent = pool_of(1, [(1, 3, 3), (2, 0, 3)])
    pool.submit(requests(2, 3, 3))
    assert sent.versions() == [(2, 0, 2), (1, 1, 3)]
    pool._on_message(4096, encode(RequestCredit(1)))
    assert sent.versions()[2:] == [(1, 2, 3)]
    pool._on_lost(2 * 4096, "died")
    assert [request.number for request in pool._waiting] == [0]
    note = pool._notes[-1]
    assert "1 of its micro-batches go to others" in note or "any longer" in note
    pool._on_message(4096, encode(RequestCredit(1)))
    rank, request = sent.messages[-1]
    assert rank == 4096
    assert request.number == 0
    assert request.version == 3, "nobody has version 2 any more"
    assert request.seed == 7
    assert [
        note
        for note in pool._notes
        if "No generator has the weights after step 2 any longer" in note
    ]


def answer_to(
    request: GenerationRequest, token: int = 1, version: int | None = None
) -> GenerationResult:
    """One response of one token to a request of one prompt."""
    versions = torch.tensor([[request.version if version is None else version]])
    tokens = torch.tensor([[token]])
    lengths = torch.tensor([1])
    completions = Completions(tokens, lengths, ("stop",), weight_versions=versions)
    rewards = Rewards(torch.ones(1), torch.zeros(1).int())
    prompt_ids = tuple(prompt.id for prompt in request.prompts)
    return GenerationResult(request.number, prompt_ids, completions, rewards)


def failure_alone(request: GenerationRequest) -> list[bytes]:
    """A result without responses, which this package's generators never send."""
    fields = {
        "kind": "GenerationResult",
        "number": request.number,
        "prompt_ids": [7],
        "finish_reasons": None,
        "sources": [],
        "faults": {},
        "failure": {"name": "GenerationError", "text": "as I like", "key": ""},
    }
    return [json.dumps(fields).encode(), b""]


WRONG_ANSWERS = {
    "another version's tokens": lambda request: encode(answer_to(request, version=2)),
    "an id that the model lacks": lambda request: encode(answer_to(request, token=32)),
    "another prompt": lambda request: encode(replace(answer_to(request), prompt_ids=(8,))),
    "no scores": lambda request: encode(replace(answer_to(request), rewards=None)),
    "a failure in place of responses": failure_alone,
    "a request that nobody gave it": lambda request: encode(replace(answer_to(request), number=5)),
    "no message": lambda request: [b"{", b""],
    "a shape that torch cannot have": lambda request: [
        encode(answer_to(request))[0],
        of_shape(0, 2**63),
    ],
    "more JSON than a message has": lambda request: [b" " * ((64 << 20) + 1), b""],
    "a second registration": lambda request: encode(Register(1, "g1", {"seed": 1})),
    "a message of the trainers": lambda request: encode(RunEnded()),
    "more requests than there are": lambda request: encode(RequestCredit(1 << 40)),
}


def of_shape(*shape: int) -> bytes:
    """Tensors of a result in safetensors' format; one has no bytes and this shape."""
    values = {"completions.tokens": {"dtype": "I64", "shape": shape, "data_offsets": [0, 0]}}
    header = json.dumps(values).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("wrong", [None, *WRONG_ANSWERS], ids=str)
def test_an_answer_that_cannot_be_one_sends_its_generator_away(wrong):
    pool, sent = pool_of(1, [(1, 0, 3), (2, 0, 3)])
    request = request_for(3)
    pool.submit([request])
    assert [rank for rank, _ in sent.messages] == [4096]
    answer = encode(answer_to(request)) if wrong is None else WRONG_ANSWERS[wrong](request)
    pool._on_message(4096, answer)
    if wrong is None:
        assert list(pool._results) == [0]
        assert set(pool._generators) == {1, 2}
        return
    assert pool._results == {}
    assert set(pool._generators) == {2}
    ranks = [rank for rank, _ in sent.messages]
    assert ranks == [4096, 2 * 4096], "the other one gets its request"
    assert sent.dismissed == [4096]


def test_a_stranger_is_sent_away_and_reported():
    pool, sent = pool_of(1, [(1, 0, 3)])
    pool._on_message(5 * 4096, [b"{", b""])
    assert sent.dismissed == [5 * 4096]
    assert set(pool._generators) == {1}
    assert len(pool._notes) == 1


def test_a_second_answer_sends_its_generator_away_and_the_first_one_counts():
    pool, sent = pool_of(1, [(1, 0, 3)])
    request = request_for(3)
    pool.submit([request])
    pool._on_message(4096, encode(answer_to(request)))
    pool._on_message(4096, encode(answer_to(request, token=2)))
    assert pool._results[0].completions.tokens.tolist() == [[1]]
    assert sent.dismissed == [4096]


def test_a_generator_that_asks_again_and_again_is_sent_away():
    pool, sent = pool_of(1, [(1, 0, 3)])
    for _ in range(3):
        pool._on_message(4096, encode(RequestCredit(1 << 15)))
    assert sent.dismissed == [4096]
    assert not pool._idle


def test_scores_that_fail_twice_end_the_run_and_once_only_the_generator():
    """The first generator may be the only one that does not reach the reward server."""
    pool, sent = pool_of(1, [(1, 0, 3), (2, 0, 3)])
    request = request_for(3)
    pool.submit([request])
    failure = RewardServerError("no answer\nwithin 9 s")
    failed = encode(replace(answer_to(request), rewards=None, failure=failure))
    pool._on_message(4096, failed)
    assert sent.dismissed == [4096]
    assert pool._notes[-1].startswith(
        "Generator g1 gave no scores: no answer within 9 s; 1 of its "
    )
    ranks = [rank for rank, _ in sent.messages]
    assert ranks == [4096, 2 * 4096]
    pool._on_message(2 * 4096, failed)
    assert sent.dismissed == [4096]
    assert isinstance(pool._results[0].failure, RewardServerError)


def without_scores(request: GenerationRequest) -> list[bytes]:
    """A result of a generator that could not reach the reward server."""
    failure = RewardServerError("no answer within 9 s", key="rewards.unreachable")
    return encode(replace(answer_to(request), rewards=None, failure=failure))


def test_scores_that_the_only_generator_does_not_get_end_the_run():
    """No other generator could get them: the trainers would wait for a new one."""
    pool, sent = pool_of(1, [(1, 0, 3)])
    request = request_for(3)
    pool.submit([request])
    pool._on_message(4096, without_scores(request))
    assert sent.dismissed == []
    failure = pool._results[0].failure
    assert isinstance(failure, RewardServerError)
    assert failure.key == "rewards.unreachable"


def test_a_generator_that_is_not_ready_cannot_get_the_scores():
    pool, sent = pool_of(1, [(1, 0, 3), (2, 0, 3)])
    pool._generators[2].is_ready = False
    request = request_for(3)
    pool.submit([request])
    pool._on_message(4096, without_scores(request))
    assert sent.dismissed == []
    assert isinstance(pool._results[0].failure, RewardServerError)


def test_an_outage_that_all_generators_see_ends_the_run():
    """Each sees it with a request of its own; the last one is not removed."""
    pool, sent = pool_of(1, [(1, 0, 3), (2, 0, 3), (3, 0, 3)])
    first = request_for(3)
    given = [first, replace(first, number=1), replace(first, number=2)]
    pool.submit(given)
    ranks = [rank for rank, _ in sent.messages]
    assert ranks == [4096, 2 * 4096, 3 * 4096]
    for number, request in enumerate(given, start=1):
        pool._on_message(number * 4096, without_scores(request))
    assert sent.dismissed == [4096, 2 * 4096]
    assert isinstance(pool._results[2].failure, RewardServerError)


@pytest.mark.parametrize(("is_scored_again", "dismissed"), [(False, []), (True, [2 * 4096])])
def test_whoever_lacked_scores_counts_once_it_gets_them_again(is_scored_again, dismissed):
    """The first generator was alone when it got none; the second one joined later."""
    pool, sent = pool_of(1, [(1, 0, 3), (2, 0, 3)])
    pool._generators[2].is_ready = False
    pool._idle = deque([1, 1])
    first = request_for(3)
    second = replace(first, number=1)
    third = replace(first, number=2)
    pool.submit([first, second])
    pool._on_message(4096, without_scores(first))
    if is_scored_again:
        pool._on_message(4096, encode(answer_to(second)))
    pool._on_message(2 * 4096, encode(RequestCredit(1)))
    pool.submit([third])
    pool._on_message(2 * 4096, without_scores(third))
    assert sent.dismissed == dismissed


def test_a_generator_without_responses_is_not_called_one_without_scores():
    pool, sent = pool_of(1, [(1, 0, 3)])
    request = request_for(3)
    pool.submit([request])
    pool._on_message(4096, failure_alone(request))
    assert sent.dismissed == [4096]
    assert pool._unscored == set()
    assert [waiting.number for waiting in pool._waiting] == [0]


def test_names_of_scores_of_one_generator_send_no_other_one_away():
    """A reward server names its attributes, which the trainers do not request."""
    pool, sent = pool_of(1, [(1, 0, 3), (2, 0, 3)])
    first = request_for(3)
    second = replace(first, number=1)
    pool.submit([first, second])
    ranks = [rank for rank, _ in sent.messages]
    assert ranks == [4096, 2 * 4096]
    pool._on_message(4096, encode(answer_to(first)))
    other = Rewards(torch.ones(1), torch.zeros(1).int(), {"kind": torch.ones(1)})
    answer = replace(answer_to(second), rewards=other)
    pool._on_message(2 * 4096, encode(answer))
    assert sent.dismissed == []
    assert list(pool._results[0].rewards.by_source) == []
    assert list(pool._results[1].rewards.by_source) == ["kind"]


def test_scores_of_more_sources_than_a_run_can_have_are_left_out():
    pool, sent = pool_of(1, [(1, 0, 3)])
    pool._idle = deque([1, 1, 1, 1])
    first = request_for(3)
    given = [first, *(replace(first, number=number) for number in (1, 2, 3))]
    pool.submit(given)
    for request in given:
        names = [f"{request.number}-{place}" for place in range(1000)]
        by_source = {name: torch.ones(1) for name in ["kind", *names[1:]]}
        rewards = Rewards(torch.ones(1), torch.zeros(1).int(), by_source)
        pool._on_message(4096, encode(replace(answer_to(request), rewards=rewards)))
    assert sent.dismissed == []
    counts = [len(pool._results[request.number].rewards.by_source) for request in given]
    assert counts == [1000, 1000, 50, 1]
    assert list(pool._results[3].rewards.by_source) == ["kind"]


def deep(levels: int) -> list[bytes]:
    """A registration with a setting that is nested too deep for `repr`."""
    text, tensors = encode(Register(1, "x", {"seed": 0}))
    return [text.replace(b'"seed": 0', b'"seed": ' + b"[" * levels + b"]" * levels), tensors]


@pytest.mark.parametrize(
    ("registration", "words"),
    [
        (encode(Register(0, "x", {"seed": 1})), "rank 0 of 0 ranks has registered"),
        (
            encode(Register(4097, "x", {"seed": 1})),
            "rank 0 of 4097 ranks has registered, expected up to 4096",
        ),
        (encode(Register(1, "x", {"seed": "a" * 100_000})), "seed is 'aaa"),
        (encode(Register(1, "x\n\x1b[2J" * 100_000, {"seed": 2})), r"Generator x \x1b[2Jx \x1b[2J"),
        (encode(GeneratorFailed(GenerationError("I was never here"))), ""),
        (deep(900), "Generator x was refused: seed is [[[[[[[...]]]]]]], the trainers' 1"),
    ],
    ids=[
        "no ranks",
        "many ranks",
        "a long value",
        "a long name",
        "no registration",
        "a deep value",
    ],
)
def test_who_cannot_be_a_generator_is_sent_away_once_in_a_sentence(registration, words):
    pool, sent = pool_of(1, [])
    for _ in range(3):
        pool._on_message(5 * 4096, registration)
    assert sent.dismissed == [5 * 4096]
    assert pool._generators == {}
    assert len(pool._notes) == bool(words)
    for note in pool._notes:
        assert words in note
        assert len(note) < 600


def test_what_a_generator_says_of_its_end_is_one_line():
    pool, _ = pool_of(1, [(1, 0, 3)])
    failure = GenerationError("out of\nmemory\x1b[2J" + "!" * 100_000)
    pool._on_message(4096, encode(GeneratorFailed(failure)))
    assert pool._generators == {}
    assert pool._notes[-1].startswith(r"Generator g1 cannot continue: out of memory\x1b[2J!!!")
    assert len(pool._notes[-1]) < 600


def test_work_of_weights_that_are_on_their_way_waits():
    pool, sent = pool_of(1, [(1, 0, 2)])
    pool.submit(requests(3))
    assert not sent.messages
    assert [request.version for request in pool._waiting] == [3]


@pytest.mark.parametrize(("other", "expected"), [({1, 6}, 6), ({1}, 1), ({1, 5}, 5)])
def test_a_generator_draws_with_weights_that_all_of_its_ranks_have(other, expected):
    """A transfer may have failed on one of them."""
    rank: Any = object.__new__(GeneratorRank)
    rank._changed = threading.Condition()
    rank.version = 1
    rank._staged = {5: {}, 6: {}}
    mesh = SimpleNamespace(
        gather_on_model_parallel_rank_0=lambda version: [version, other],
        from_model_parallel_rank_0=lambda value: value,
    )
    rank._model = SimpleNamespace(mesh=mesh)
    assert rank._newest() == expected


def test_a_prompt_in_any_order_goes_to_who_has_the_least_to_do():
    """Any weights that are new enough will do; a generator may ask for several requests at once."""
    pool, sent = pool_of(1, [(1, 5, 5), (2, 0, 1), (3, 0, 3)])
    pool._idle = deque()
    for number, room in ((1, 3), (2, 1), (3, 2)):
        pool._on_message(number * 4096, encode(RequestCredit(room)))
    pool.submit([replace(request, allow_newer=True) for request in requests(2, 2, 2, 2, 2, 2)])
    given = [(rank // 4096, request.version) for rank, request in sent.messages]
    assert given == [(1, 2), (3, 2), (1, 2), (3, 2), (1, 2)]
    assert len(pool._waiting) == 1
    assert set(pool._given) == set(range(5))
    pool._on_lost(3 * 4096, "died")
    assert [request.number for request in pool._waiting] == [1, 3, 5]


class SwappedWeights:
    """A rank without connections; its weights are the number of their version.

    They change places with older weights.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, staleness: int):
        self.loaded = -1

        def exchange(lm: Any, weights: list[int]) -> None:
            before = self.loaded
            self.loaded = weights[0]
            weights[0] = before

        monkeypatch.setattr("reinforce_rl.rollout.generator_rank.exchange_weights", exchange)
        rank: Any = object.__new__(GeneratorRank)
        rank._changed = threading.Condition()
        rank._staged = {}
        rank._staleness = staleness
        rank._groups = None
        rank._is_alone = True
        rank._failure = None
        rank._has_ended = False
        rank._is_of_job = False
        rank._stop = SimpleNamespace(reason=None)
        rank._newest_received = -1
        rank.version = -1
        rank._model = SimpleNamespace(lm=None)
        self.rank = rank

    def receive(self, version: int) -> None:
        rank = self.rank
        rank._staged[version] = [version]
        rank._newest_received = version
        rank._forget_old()


@pytest.mark.timeout(20)  # a test that waits for missing weights would hang
class TestVersions:
    """A request is generated with the version that it names, by a generator that has it."""

    @pytest.mark.parametrize("staleness", [0, 1, 2])
    def test_a_generator_has_its_newest_weights_and_so_many_before(self, staleness, monkeypatch):
        swapped = SwappedWeights(monkeypatch, staleness=staleness)
        for version in range(5):
            swapped.receive(version)
        assert sorted(swapped.rank._staged) == list(range(4 - staleness, 5))

    def test_weights_that_are_used_again_are_those_of_their_version(self, monkeypatch):
        """Requests of a lost generator return with an older version.

        Later requests have newer versions.
        """
        swapped = SwappedWeights(monkeypatch, staleness=2)
        for version in (1, 2, 3):
            swapped.receive(version)
        for version in (3, 1, 2, 3, 2, 1):
            swapped.rank._load(version)
            assert swapped.rank.version == version
            assert swapped.loaded == version
            others = {1, 2, 3} - {version}
            staged = {
                number: weights[0] for number, weights in swapped.rank._staged.items() if number > 0
            }
            assert staged == {number: number for number in others}

    def test_weights_that_are_not_there_are_waited_for(self, monkeypatch):
        swapped = SwappedWeights(monkeypatch, staleness=2)
        swapped.receive(1)

        def arrive() -> None:
            with swapped.rank._changed:
                swapped.receive(2)
                swapped.rank._changed.notify_all()

        timer = threading.Timer(0.1, arrive)
        timer.start()
        swapped.rank._load(2)
        timer.join()
        assert swapped.rank.version == 2
        assert swapped.loaded == 2

    def test_older_weights_than_may_be_asked_for_go_when_they_are_put_back(self, monkeypatch):
        swapped = SwappedWeights(monkeypatch, staleness=1)
        for version in (1, 2):
            swapped.receive(version)
        swapped.rank._load(1)
        swapped.receive(3)
        swapped.rank._load(3)
        assert sorted(swapped.rank._staged) == [2], "weights 1 are two versions old"

    @pytest.mark.parametrize(
        ("since", "newest", "staleness", "able"),
        [
            (0, 3, 0, {3}),
            (0, 3, 1, {2, 3}),
            (0, 3, 5, {0, 1, 2, 3}),
            (2, 3, 5, {2, 3}),
            (3, 3, 1, {3}),
        ],
    )
    def test_a_generator_is_given_work_of_the_versions_that_it_has(
        self, since, newest, staleness, able
    ):
        """Versions since it joined; it keeps `staleness` of them besides the newest."""
        other = (2, 0, 9)  # never idle, so that no version is given up
        given = set()
        for version in range(5):
            pool, sent = pool_of(staleness, [(1, since, newest), other])
            pool._generators[2].since = 0
            pool._generators[2].version = staleness
            pool._idle = deque([1])
            pool.submit(requests(version))
            given |= {request.version for _, request in sent.messages}
        assert given == able

    def test_work_of_a_lost_generator_is_done_again_with_its_own_weights(self):
        pool, sent = pool_of(2, [(1, 0, 3), (2, 0, 3)])
        pool._idle = deque([1])
        pool.submit(requests(1, 2, 3))
        pool._on_message(4096, encode(RequestCredit(1)))
        assert sent.versions() == [(1, 0, 1), (1, 1, 2)]
        pool._on_lost(4096, "died")
        assert [request.number for request in pool._waiting] == [0, 1, 2]
        for _ in range(3):
            pool._on_message(2 * 4096, encode(RequestCredit(1)))
        assert sent.versions()[2:] == [(2, 0, 1), (2, 1, 2), (2, 2, 3)]
        for _, request in sent.messages[2:]:
            assert request.seed == 7

    def test_weights_are_given_up_only_where_nobody_has_them_and_then_for_the_oldest_there_are(
        self,
    ):
        """Generator 1 has only 3; 2 is busy and has 2 and 3: a request of 1 gets 2, not 3."""
        pool, sent = pool_of(1, [(1, 3, 3), (2, 0, 3)])
        pool._idle = deque([1])
        pool.submit(requests(1, 2))
        assert sent.messages == []
        assert [request.version for request in pool._waiting] == [2, 2]
        pool._on_message(2 * 4096, encode(RequestCredit(2)))
        assert sent.versions() == [(2, 0, 2), (2, 1, 2)]

    def settled(self, since: int, version: int, faults: dict[int, str], *, epoch: int = 1) -> Any:
        """Return a generator of a pool after weights 4 were sent to it."""
        pool, _ = pool_of(1, [(1, since, version)])
        pool.group = SimpleNamespace(fault="", abandon=lambda *_: None, close=lambda: None)
        pool._silence_seconds = 0.05
        pool._answers = {}
        pool._epoch = 1
        pool._newest = 4
        pool._sent = NewWeights(1, 4, 1, 2), (4096,)
        for rank, fault in faults.items():
            pool._on_message(rank, encode(Received(epoch, 4, fault)))
        pool._settle()
        return pool._generators.get(1)

    def test_a_generator_that_received_weights_has_them_and_keeps_those_since_it_came(self):
        newcomer = self.settled(-1, -1, {4096: ""})
        assert newcomer.since == 4
        assert newcomer.version == 4
        older = self.settled(2, 3, {4096: ""})
        assert older.since == 2
        assert older.version == 4

    def test_a_generator_that_could_not_receive_them_does_not_have_them(self):
        generator = self.settled(2, 3, {4096: "the connection was closed"})
        assert generator.since == 2
        assert generator.version == 3
        assert generator.failures == 1

    def test_an_answer_of_an_earlier_transfer_does_not_count(self):
        assert self.settled(2, 3, {4096: ""}, epoch=0) is None, (
            "it said nothing of this one in time"
        )

    @pytest.mark.parametrize(("version", "lacks"), [(-1, True), (2, True), (3, False)])
    def test_whoever_has_not_the_newest_weights_lacks_them(self, version, lacks):
        pool, _ = pool_of(1, [(1, version, version)])
        pool._newest = 3
        assert pool._lacking() == ([4096] if lacks else [])
        assert pool._has_newest() is not lacks

    @pytest.mark.parametrize(("version", "is_accepted"), [(2, True), (3, True), (4, False)])
    def test_no_token_is_of_weights_that_nobody_was_sent(self, version, is_accepted):
        pool, _ = pool_of(1, [(1, 0, 3)])
        request = request_for(2, allow_newer=True)
        pool.submit([request])
        pool._on_message(4096, encode(answer_to(request, version=version)))
        assert list(pool._results) == ([0] if is_accepted else [])
