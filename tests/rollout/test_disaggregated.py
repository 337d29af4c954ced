"""Generation on separate ranks.

Without staleness the numbers equal the colocated run's; with staleness they are equal for any
number of generators, and after kills.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.archives import compressed
from helpers.errors import check_fault
from helpers.models import tiny_llama_folder
from helpers.tiny_run import largest_difference, metrics_of, rollouts_of, tiny_config, without_times
from helpers.trainer_processes import (
    NUM_PROMPTS,
    SETTINGS,
    STEPS,
    TrainerProcesses,
    assert_equal_runs,
)
from helpers.vllm_engine import OF_RUNS, vllm_model, vllm_overrides
from safetensors.torch import load_file

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.debugging.diff import diff
from reinforce_rl.errors import (
    EXIT_LOST_RANK,
    EXIT_STOPPED,
    CheckpointError,
    ConfigError,
    GenerationError,
    ReinforceError,
)
from reinforce_rl.monitoring.glossary import metric_of
from reinforce_rl.monitoring.records import read_tokens
from reinforce_rl.rewards.base import STATUS_OK, Rewards
from reinforce_rl.rollout.generator_rank import GeneratorRank
from reinforce_rl.rollout.generators import Generators
from reinforce_rl.rollout.messages import GenerationRequest, GenerationResult
from reinforce_rl.rollout.source import RolloutHandle
from reinforce_rl.runtime.status import read_status
from reinforce_rl.runtime.stop import StopRequest

SLOW = pytest.mark.slow
FAILED = STATUS_OK + 1
APART = ("placement=disaggregated", "generation_ranks=1")
TWO_GENERATORS = ("placement=disaggregated", "generation_ranks=2")
# State that lasts over steps, and two saves: a kill loses the steps after the first.
STATEFUL = (
    "trainer.reinforce.advantage_estimator=running_mean",
    "trainer.reinforce.kl_target=0.05",
    "trainer.reinforce.kl_horizon=50",
    "trainer.reinforce.val_check_interval=2",
)


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


def finish(processes: TrainerProcesses, folder: Path, *overrides: str, ranks: int = 2) -> Path:
    return processes.finish(folder, *SETTINGS, *STATEFUL, *overrides, ranks=ranks)


def finish_two_layers(
    processes: TrainerProcesses, folder: Path, *overrides: str, ranks: int
) -> Path:
    folder.mkdir(exist_ok=True)
    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16
    )
    return finish(processes, folder, *overrides, ranks=ranks)


@pytest.fixture(scope="module")
def apart(processes, tmp_path_factory) -> Path:
    """A run whose rollouts are one step old."""
    return finish(processes, tmp_path_factory.mktemp("apart"), *APART)


def assert_same_training(folder: Path, other: Path) -> None:
    for line, expected in zip(metrics_of(folder), metrics_of(other), strict=True):
        assert without_times(line) == without_times(expected)
    for step in range(1, len(metrics_of(other))):  # filtering uses the prompts up sooner
        assert rollouts_of(folder, step) == rollouts_of(other, step)
    weights = load_file(folder / "run" / "hf" / "model.safetensors")
    other_weights = load_file(other / "run" / "hf" / "model.safetensors")
    for name in other_weights:
        assert torch.equal(weights[name], other_weights[name])


def without_padding(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in without_times(line).items() if "padding" not in key}


LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4")
FILTERING = (
    "trainer.reinforce.dynamic_filtering=true",
    "trainer.reinforce.max_resampling_rounds=1",
)


@pytest.mark.more
@pytest.mark.parametrize(
    ("trainers", "generators", "overrides"),
    [
        pytest.param(1, 1, (), id="one trainer"),
        pytest.param(2, 2, (), id="two and two", marks=SLOW),
        pytest.param(1, 2, LORA, id="LoRA", marks=SLOW),
        pytest.param(1, 1, FILTERING, id="dynamic filtering", marks=SLOW),
    ],
)
def test_without_staleness_it_is_the_colocated_run_bit_for_bit(
    trainers, generators, overrides, processes, tmp_path
):
    colocated = finish(processes, tmp_path / "colocated", *overrides, ranks=trainers)
    settings = ("placement=disaggregated", f"generation_ranks={generators}", "max_staleness=0")
    apart = finish(
        processes, tmp_path / "apart", *overrides, *settings, ranks=trainers + generators
    )
    assert_same_training(apart, colocated)
    assert not diff(colocated / "run", apart / "run").exact


TRAINERS = {"TP2": (2, "tensor"), "PP2": (2, "pipeline"), "one": (1, "tensor")}


@pytest.mark.parametrize(
    ("trainers", "tensor"),
    [
        pytest.param("PP2", 2, id="PP2 to TP2", marks=SLOW),
        pytest.param("TP2", 1, id="TP2 to TP1", marks=SLOW),
        pytest.param("TP2", 2, id="TP2 to TP2", marks=SLOW),
        pytest.param("PP2", 1, id="PP2 to TP1", marks=SLOW),
        pytest.param("one", 2, id="one to TP2", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    "lora", [False, pytest.param(True, marks=SLOW)], ids=["whole model", "LoRA"]
)
def test_the_layouts_of_trainers_and_generators_change_no_number(
    trainers, tensor, lora, processes, tmp_path
):
    ranks, kind = TRAINERS[trainers]
    adapters = LORA if lora else ()
    expected = finish_two_layers(processes, tmp_path / "one", *adapters, ranks=1)
    layout = (
        f"model.{kind}_model_parallel_size={ranks}",
        f"generation_tensor_parallel_size={tensor}",
    )
    settings = (
        "placement=disaggregated",
        f"generation_ranks={tensor}",
        "max_staleness=0",
        *layout,
        *adapters,
    )
    apart = finish_two_layers(processes, tmp_path / "apart", *settings, ranks=ranks + tensor)
    for line, other in zip(metrics_of(apart), metrics_of(expected), strict=True):
        pair = [without_padding(line), without_padding(other)]
        assert largest_difference(*pair) < 1e-4, line["step"]


@pytest.mark.more
def test_a_trainer_without_prompts_takes_part_in_the_step(processes, tmp_path):
    """The epoch's last step has one prompt for two trainers."""
    settings = ("trainer.reinforce.max_epochs=1", "model.reinforce.num_rollout_samples=3")
    processes.finish(tmp_path, *SETTINGS, *APART, *settings, ranks=3)
    lines = metrics_of(tmp_path)
    steps = [line["step"] for line in lines]
    assert steps == [0, 1, 2, 3, 4]
    assert lines[-1]["train/consumed_prompts"] == NUM_PROMPTS
    for line in lines[2:]:
        assert "train/generator_logprob_diff_age_1" in line


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_each_token_is_of_the_version_that_its_step_asks_for(staleness, apart, processes, tmp_path):
    folder = apart
    if staleness != 1:
        folder = finish(processes, tmp_path, *APART, f"max_staleness={staleness}")
    lines = metrics_of(folder)
    for step in range(1, STEPS + 1):
        expected = max(0, step - 1 - staleness)
        tokens = read_tokens(folder / "run" / "rollouts" / f"step_{step:05d}.parquet")
        versions = {version for response in tokens for version in response.weight_versions or []}
        assert versions == {expected}
        assert lines[step]["train/staleness"] == step - 1 - expected
    for name in lines[STEPS].keys() - {"step", "time"}:
        assert metric_of(name), name
    assert "timers/send_weights" in lines[STEPS]
    for epoch in range(4):
        prompts: Counter[int] = Counter()
        for step in range(3 * epoch + 1, 3 * epoch + 4):
            prompts.update(row["prompt_id"] for row in rollouts_of(folder, step))
        assert prompts == dict.fromkeys(range(NUM_PROMPTS), 4)


def test_the_log_probs_of_older_weights_are_corrected(apart):
    """The KL and the ratio use the weights being trained, not the weights that generated."""
    lines = metrics_of(apart)
    assert "generator_correction: sequence" in (apart / "run" / "config.yaml").read_text()
    assert lines[1]["train/generator_logprob_diff"] < 1e-6  # of the same weights
    for line in lines[2:]:
        assert line["train/generator_logprob_diff"] > 1e-3
    assert lines[1]["train/effective_sample_size"] > 0.999999
    smallest = min(line["train/effective_sample_size"] for line in lines[2:])
    assert smallest < 0.999


@pytest.mark.more
def test_neither_the_number_of_generators_nor_their_speed_changes_a_number(
    apart, processes, tmp_path
):
    assert_equal_runs(finish(processes, tmp_path, *TWO_GENERATORS, ranks=3), apart)


@pytest.mark.more
@pytest.mark.parametrize(
    "kills", [2, pytest.param(5, marks=SLOW, id="5-a"), pytest.param(5, marks=SLOW, id="5-b")]
)
def test_killed_at_random_moments(kills, apart, processes, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    draw = random.Random(seed)
    lines = metrics_of(apart)
    seconds = (lines[-1]["time"] - lines[0]["time"]) / kills
    for _ in range(kills):
        processes.kill_at_random(tmp_path, draw, seconds, *SETTINGS, *STATEFUL, *APART, ranks=2)
    assert_equal_runs(finish(processes, tmp_path, *APART), apart)


@pytest.mark.more
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_saves_the_rollouts_under_way(rank, apart, processes, tmp_path):
    act = {"rank": rank, "phase": "generate", "step": 5, "signal": signal.SIGTERM}
    processes.start(tmp_path, *SETTINGS, *STATEFUL, *APART, ranks=2, patience=60, act=act)
    processes.wait()
    said = (tmp_path / "log").read_text()
    assert processes.statuses[0] == EXIT_STOPPED, said
    assert processes.statuses[1] in (0, EXIT_STOPPED), said
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text().strip()
    stored = torch.load(newest / "rollouts.pt", weights_only=True)
    steps = [handle["step"] for handle in stored]
    assert steps == [stored[0]["version"] + 2]
    finish(processes, tmp_path, *APART)
    assert_same_training(tmp_path, apart)


@pytest.mark.more
@pytest.mark.parametrize(
    ("rank", "phase", "number"),
    [
        (1, "generate", signal.SIGKILL),
        pytest.param(0, "train_time", signal.SIGSTOP, marks=SLOW),
        pytest.param(1, "waiting for prompts", signal.SIGSTOP, marks=SLOW),
    ],
)
def test_a_lost_rank_is_named_and_the_run_goes_on(rank, phase, number, apart, processes, tmp_path):
    act = {"rank": rank, "phase": phase, "step": 4, "signal": number}
    limits = ("trainer.heartbeat_timeout_seconds=6", "trainer.collective_timeout_seconds=30")
    patience = 1 if number == signal.SIGSTOP else 40  # a stopped process cannot end itself
    processes.start(
        tmp_path, *SETTINGS, *STATEFUL, *APART, *limits, ranks=2, patience=patience, act=act
    )
    processes.wait()
    said = (tmp_path / "log").read_text()
    assert processes.statuses[1 - rank] == EXIT_LOST_RANK, said
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.exit_code == EXIT_LOST_RANK
    assert f"rank {rank} (host " in status.reason
    assert f"phase {phase} of step 4" in status.reason
    finish(processes, tmp_path, *APART)
    assert_same_training(tmp_path, apart)


@pytest.mark.engine
def test_an_engine_generates(processes, tmp_path):
    """The real vLLM on a generation rank.

    Without staleness it equals the colocated engine bit for bit.
    """
    runs = {}
    for name, ranks, settings in [
        ("colocated", 1, ()),
        ("apart", 2, (*APART, "max_staleness=0")),
        ("older", 2, APART),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        vllm_model(folder)
        runs[name] = finish(processes, folder, *vllm_overrides(), *OF_RUNS, *settings, ranks=ranks)
    apart = metrics_of(runs["apart"])
    colocated = metrics_of(runs["colocated"])
    for line in apart[1:]:
        assert line["train/generator_logprob_diff"] < 1e-5
    for line, expected in zip(apart, colocated, strict=True):
        assert without_times(line) == without_times(expected)
    staleness = [line["train/staleness"] for line in metrics_of(runs["older"])[1:]]
    assert staleness == [0.0, 1.0, 1.0]


FUNCTION = (
    "reward=function",
    "+reward_function.kwargs.target=4",
    "+reward_function.kwargs.tolerance=4",
)


@pytest.mark.slow
def test_the_generators_ask_for_the_rewards(processes, tmp_path):
    """A real reward function in processes of the generation rank; then one that fails there."""
    function = (
        *FUNCTION,
        "reward_function.name=reinforce_rl.rewards.functions.length",
        "max_staleness=0",
    )
    unit = "+reward_function.kwargs.unit=characters"
    apart = finish(processes, tmp_path / "apart", *APART, *function, unit)
    rows = rollouts_of(apart, STEPS)
    for row in rows:
        too_long = len(row["response"]) - 4
        assert row["reward"] == max(0.0, 1 - abs(too_long) / 4)
    (tmp_path / "wrong").mkdir()
    wrong = (
        *FUNCTION,
        "reward_function.name=reinforce_rl.rewards.functions.length",
        "+reward_function.kwargs.of=1",
    )
    processes.start(tmp_path / "wrong", *SETTINGS, *APART, *wrong, ranks=2, patience=60)
    processes.wait()
    said = (tmp_path / "wrong" / "log").read_text()
    assert processes.statuses == [1, 0], said
    assert "reward_function" in said
    assert "unexpected keyword argument" in said
    assert "Traceback" not in said


@pytest.mark.more
def test_a_generator_that_cannot_begin_ends_a_run_that_goes_on(processes, tmp_path):
    """The trainers have sent weights by then, which the generator never receives."""
    function = (*FUNCTION, "reward_function.name=reinforce_rl.rewards.functions.length")
    processes.start(
        tmp_path, *SETTINGS, *APART, *function, die_before="rollouts/step_00005", ranks=2
    )
    processes.wait()
    wrong = (*function, "+reward_function.kwargs.of=1", "resume_with_changes=true")
    processes.start(tmp_path, *SETTINGS, *APART, *wrong, ranks=2, patience=60)
    processes.wait()
    said = (tmp_path / "log").read_text()
    assert processes.statuses == [1, 0], said
    assert "after step 3 of 12" in said
    assert "unexpected keyword argument" in said


@pytest.mark.more
def test_stored_rollouts_of_other_settings_are_not_trained_on(processes, tmp_path):
    processes.start(
        tmp_path, *SETTINGS, *STATEFUL, *APART, die_before="rollouts/step_00005", ranks=2
    )
    processes.wait()
    finish(processes, tmp_path, *APART, "max_staleness=0", "resume_with_changes=true")
    lines = metrics_of(tmp_path)[1:]
    staleness = [line.get("train/staleness") for line in lines]
    assert staleness == [0.0, 1.0, 1.0] + [None] * (STEPS - 3)
    for line in lines[3:]:
        assert line["train/generator_logprob_diff"] < 1e-6


class LostPool:
    """A pool with a generator that has failed."""

    def await_results(self, numbers: list[int], *rest: object) -> bool:
        raise GenerationError("the engine is gone")

    results = await_results


def test_a_failed_generator_does_not_keep_the_last_step_from_being_saved():
    pool: Any = LostPool()
    mesh = SimpleNamespace(raise_on_all_ranks=contextlib.nullcontext, from_main=lambda value: value)
    model: Any = SimpleNamespace(mesh=mesh)
    generators = Generators(model, pool, None, StopRequest())  # type: ignore[arg-type]
    generators.version = 3
    stored = {7: {"tokens": torch.zeros(2, 3)}}
    handles = {4: RolloutHandle([], 2, stored)}
    handles[5] = RolloutHandle([[0]], 2)
    handles[6] = RolloutHandle([[1]], 2)
    content = generators.state(handles)
    restored = generators.restore(content)
    assert list(restored) == [4]
    assert restored[4].version == 2
    restored_rollouts = restored[4].stored
    assert restored_rollouts is not None
    assert torch.equal(restored_rollouts[7]["tokens"], stored[7]["tokens"])


@pytest.mark.slow
def test_slow_rewards_are_no_hang(processes, tmp_path):
    """12 samples take a second each in one process; the collective timeout is 5 s."""
    function = ("reward=function", "reward_function.name=helpers.reward_functions.takes_a_second")
    limits = (
        "reward_function.num_workers=1",
        "trainer.collective_timeout_seconds=5",
        "trainer.reinforce.max_steps=2",
    )
    finish(processes, tmp_path, *APART, *function, *limits)
    steps = [line["step"] for line in metrics_of(tmp_path)]
    assert steps == [0, 1, 2]


@pytest.mark.slow
def test_a_colocated_run_goes_on_with_generators(processes, tmp_path):
    processes.start(
        tmp_path, *SETTINGS, *STATEFUL, "trainer.reinforce.save_interval=1", die_before="step_00004"
    )
    assert processes.wait() == -signal.SIGKILL
    finish(processes, tmp_path, *APART, "resume_with_changes=true")
    ages = [line.get("train/staleness") for line in metrics_of(tmp_path)[1:]]
    assert ages[:3] == [None] * 3
    assert ages[3:] == [0.0] + [1.0] * (STEPS - 4)


@pytest.mark.parametrize(
    ("overrides", "key", "named"),
    [
        (
            ["generation_ranks=1"],
            "config.placement.not_disaggregated",
            ["generation_ranks", "placement", "disaggregated"],
        ),
        (
            ["max_staleness=1"],
            "config.max_staleness.conflicts_with_colocated",
            ["max_staleness", "placement"],
        ),
        (
            [*APART, "generation_ranks=2"],
            "config.generation_ranks.out_of_range",
            ["generation_ranks", "2 ranks"],
        ),
        (
            [*APART, "generation_tensor_parallel_size=2"],
            "config.generation_ranks.out_of_range",
            ["multiple of 2"],
        ),
        (
            [
                "trainer.devices=4",
                *APART,
                "generation_ranks=3",
                "generation_tensor_parallel_size=3",
            ],
            "config.generation_tensor_parallel_size.not_a_divisor_of_feed_forward",
            ["generation_tensor_parallel_size", "32"],
        ),
        (
            [*APART, "preflight=deep"],
            "config.preflight.conflicts_with_disaggregated",
            ["preflight", "placement"],
        ),
        (
            [*APART, "generation=tensorrt_llm"],
            "config.generation.conflicts_with_disaggregated",
            ["generation", "placement", "native", "vllm"],
        ),
        (
            [*APART, "trainer.reinforce.dynamic_filtering=true"],
            "config.dynamic_filtering.conflicts_with_max_staleness",
            ["dynamic_filtering", "max_staleness"],
        ),
        (
            [*APART, "trainer.reinforce.generator_correction=none"],
            "config.max_staleness.without_generator_correction",
            ["max_staleness", "generator_correction", "sequence"],
        ),
        (
            [*APART, "model.tensor_model_parallel_size=2"],
            "config.parallel_sizes.not_a_divisor_of_ranks",
            ["tensor_model_parallel_size", "1 ranks", "generation_ranks"],
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides, key, named, tmp_path):
    with pytest.raises(ConfigError) as error:
        tiny_config(tmp_path, "trainer.devices=2", *overrides)
    check_fault(error.value.faults, key, *named)


class EngineThatFails:
    """Wakes, and fails at its second call."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.events.append("wakes")
        yield
        self.events.append("sleeps")

    def refit(self) -> None:
        self.events.append("refit")

    def infer(self, prompts: Any, *rest: Any, **options: Any) -> Completions:
        self.events.append("answers")
        if self.events.count("answers") == 2:
            raise GenerationError("out of memory")
        tokens = torch.ones(1, 1, dtype=torch.long)
        lengths = torch.ones(1, dtype=torch.long)
        return Completions(tokens, lengths, ("stop",))


def test_an_engine_that_failed_is_not_put_to_sleep():
    engine = EngineThatFails()
    rank: Any = object.__new__(GeneratorRank)  # without its connections
    rank._model = SimpleNamespace(generator=engine, infer=engine.infer, lm=None)
    rank._awake = None
    rank._is_model_parallel_rank_0 = False
    rank.version = 1
    request = GenerationRequest(0, 1, 0, (Prompt(0, "", (3,)),), 1, 0)
    completions = rank._answer(request)[0].completions
    with pytest.raises(GenerationError):
        rank._answer(request)
    rank._sleep()
    assert completions is not None
    assert completions.weight_versions.tolist() == [[1]]
    assert engine.events == ["wakes", "answers", "answers"]


class RecordedPool:
    """Rank 0's queue; records submissions and returns these results."""

    def __init__(self, *results: GenerationResult) -> None:
        self.submitted: list[GenerationRequest] = []
        self.readmitted: list[tuple[GenerationRequest, GenerationResult]] = []
        self.announced: list[int] = []
        self.by_number = {result.number: result for result in results}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.submitted += requests

    def readmit(self, request: GenerationRequest, result: GenerationResult) -> None:
        self.readmitted.append((request, result))

    def group_for(self, version: int) -> None:
        self.announced.append(version)

    def await_results(self, *rest: object) -> bool:
        return False

    def results(self, numbers: Sequence[int]) -> list[GenerationResult]:
        return [self.by_number[number] for number in numbers]

    def finished(self) -> list[GenerationResult]:
        return list(self.by_number.values())


def generators_of(
    pool: RecordedPool | None, monkeypatch: pytest.MonkeyPatch, *, takes_finished: bool = False
) -> Generators:
    """The trainers' side of generation: one rank, two prompts in a micro-batch."""

    def cut(prompts: Sequence[Prompt], validation: bool) -> list[Sequence[Prompt]]:
        return [prompts[start : start + 2] for start in range(0, len(prompts), 2)]

    monkeypatch.setattr("reinforce_rl.rollout.generators.send_weights", lambda lm, group: None)
    mesh = SimpleNamespace(
        gather_over_dp=lambda value: [value],
        raise_on_all_ranks=contextlib.nullcontext,
        from_main=lambda value: value,
        dp_rank=0,
    )
    model: Any = SimpleNamespace(mesh=mesh, lm=None)
    return Generators(model, pool, cut, StopRequest(), takes_finished)  # type: ignore[arg-type]


def result_of(
    number: int, *prompts: int, version: int = 1, statuses: Sequence[int] = ()
) -> GenerationResult:
    """Two responses a prompt; all tokens, log-probs and scores differ."""
    count = 2 * len(prompts)
    tokens = torch.arange(count * 3).reshape(count, 3)
    finish_reasons = tuple("stop" if row % 2 else "length" for row in range(count))
    completions = Completions(
        tokens=tokens,
        lengths=torch.arange(count) % 3 + 1,
        finish_reasons=finish_reasons,
        log_probs=-tokens / 7,
        weight_versions=torch.full((count, 3), version),
    )
    status = torch.tensor(statuses or [STATUS_OK] * count, dtype=torch.int32)
    values = torch.arange(count).float().masked_fill(status != STATUS_OK, torch.nan)
    faults = {row: f"fault of row {row}" for row in range(count) if int(status[row]) != STATUS_OK}
    rewards = Rewards(values, status, {"a": values * 2}, faults)
    return GenerationResult(number, prompts, completions, rewards)


PROMPTS = [Prompt(number, "", (3,)) for number in (7, 8, 9)]


class TestHandles:
    """Which weights a request names, and which rollouts a checkpoint keeps."""

    def test_a_step_asks_for_its_version_however_new_the_weights_are(self, monkeypatch):
        pool = RecordedPool()
        generators = generators_of(pool, monkeypatch)
        generators.publish(5)
        handle = generators.submit(PROMPTS, 2, 1, 6, 3)
        assert handle.version == 3
        submitted = [
            (request.number, request.version, len(request.prompts)) for request in pool.submitted
        ]
        assert submitted == [(0, 3, 2), (1, 3, 1)]
        assert pool.announced == [5]

    def test_after_a_resume_nothing_older_than_the_checkpoint_is_asked_for(self, monkeypatch):
        """Generators have nothing older than the checkpoint's weights, also after later updates."""
        pool = RecordedPool()
        generators = generators_of(pool, monkeypatch)
        generators.publish(4, as_oldest=True)
        assert generators.submit(PROMPTS, 2, 1, 5, 2).version == 4
        generators.publish(5)
        assert generators.submit(PROMPTS, 2, 1, 6, 3).version == 4
        assert generators.submit(PROMPTS, 2, 1, 7, 5).version == 5

    def test_in_any_order_a_step_takes_newer_weights_and_a_validation_the_newest_alone(
        self, monkeypatch
    ):
        pool = RecordedPool()
        generators = generators_of(pool, monkeypatch, takes_finished=True)
        generators.publish(4, as_oldest=True)
        generators.publish(6)
        generators.submit(PROMPTS[:1], 2, 1, 7, 5)
        generators.submit(PROMPTS[:1], 1, 1, 0, generators.version)
        submitted = [(request.version, request.allow_newer) for request in pool.submitted]
        assert submitted == [(4, True), (6, False)]

    @pytest.mark.parametrize("version", [1, 3])
    def test_rollouts_of_older_weights_come_back_as_they_were(self, version, monkeypatch):
        result = result_of(0, 7, 8, version=version)
        pool = RecordedPool(result)
        generators = generators_of(pool, monkeypatch)
        generators.version = 4
        content = generators.state({5: RolloutHandle([[0]], version)})
        handles = generators_of(RecordedPool(), monkeypatch).restore(content)
        versions = {step: handle.version for step, handle in handles.items()}
        assert versions == {5: version}
        results = generators.collect(handles[5], PROMPTS[:2])
        prompt_ids = [group.prompt_ids for group in results]
        assert prompt_ids == [(7,), (8,)]
        assert result.completions is not None
        assert result.rewards is not None
        for place, group in enumerate(results):
            rows = slice(2 * place, 2 * place + 2)
            assert group.completions is not None
            assert group.rewards is not None
            for name in ("tokens", "lengths", "log_probs", "weight_versions"):
                stored = getattr(group.completions, name)
                drawn = getattr(result.completions, name)
                assert torch.equal(stored, drawn[rows]), name
            assert group.completions.finish_reasons == result.completions.finish_reasons[rows]
            assert torch.equal(group.rewards.values, result.rewards.values[rows])
            assert torch.equal(group.rewards.by_source["a"], result.rewards.by_source["a"][rows])

    def test_rollouts_of_the_newest_weights_are_made_again(self, monkeypatch):
        generators = generators_of(RecordedPool(result_of(0, 7), result_of(1, 8)), monkeypatch)
        generators.version = 4
        handles = {5: RolloutHandle([[0]], 3), 6: RolloutHandle([[1]], 4)}
        content = generators.state(handles)
        assert list(generators.restore(content)) == [5]

    def test_a_lost_rank_ends_the_state_on_all_ranks_and_a_failed_generation_does_not(
        self, monkeypatch
    ):
        def raising(error: Exception) -> Callable[[], contextlib.AbstractContextManager[None]]:
            @contextlib.contextmanager
            def raise_on_all_ranks() -> Iterator[None]:
                yield
                raise error

            return raise_on_all_ranks

        for pool in (RecordedPool(result_of(0, 7)), None):
            generators = generators_of(pool, monkeypatch)
            generators.version = 4
            mesh: Any = generators._mesh
            # What rank 0 raises as another type, the others may raise as a plain ReinforceError.
            lost = ConnectionError("gone") if pool is not None else ReinforceError("rank 0 failed")
            mesh.raise_on_all_ranks = raising(lost)
            mesh.from_main = lambda value: True  # rank 0 has lost a connection
            with pytest.raises(type(lost)):
                generators.state({5: RolloutHandle([[0]], 3)})
            failed = (
                GenerationError("none") if pool is not None else ReinforceError("rank 0 failed")
            )
            mesh.raise_on_all_ranks = raising(failed)
            mesh.from_main = lambda value: False
            content = generators.state({5: RolloutHandle([[0]], 3)})
            assert bool(content) == (pool is not None)

    def test_a_state_that_torch_would_unpack_is_refused(self, monkeypatch):
        generators = generators_of(RecordedPool(result_of(0, 7)), monkeypatch)
        generators.version = 9
        content = generators.state({5: RolloutHandle([[0]], 1)})
        assert generators.restore(content)
        with pytest.raises(CheckpointError):
            generators.restore(compressed(content))

    @pytest.mark.parametrize("statuses", [(STATUS_OK, FAILED), (FAILED, FAILED)])
    def test_a_step_with_a_failed_score_and_all_after_it_are_not_kept(self, statuses, monkeypatch):
        """The resumed run requests them again and may get the score then."""
        results = result_of(0, 7), result_of(1, 8, statuses=statuses), result_of(2, 9)
        generators = generators_of(RecordedPool(*results), monkeypatch)
        generators.version = 9
        handles = {step: RolloutHandle([[step - 5]], 1) for step in (5, 6, 7)}
        content = generators.state(handles)
        assert list(generators.restore(content)) == [5]
        one_step = generators.state({5: RolloutHandle([[0, 1]], 1)})
        assert generators.restore(one_step) == {}, "a step is kept as a whole"

    def test_faults_stay_with_their_samples(self, monkeypatch):
        """In any order, results are kept by prompt.

        Failed ones are left out of the rank's own pool alone.
        """
        result = result_of(
            0, 7, 8, 9, statuses=[STATUS_OK, FAILED, STATUS_OK, STATUS_OK, FAILED, STATUS_OK]
        )
        generators = generators_of(RecordedPool(result), monkeypatch, takes_finished=True)
        generators.restore(generators.state({}))
        pool = RecordedPool()
        generators._give(
            [GenerationRequest(n, 1, 0, (prompt,), 2, 1, True) for n, prompt in enumerate(PROMPTS)],
            pool,
        )  # type: ignore[arg-type]
        faults = [
            dict(kept.rewards.faults) for _, kept in pool.readmitted if kept.rewards is not None
        ]
        assert faults == [{1: "fault of row 1"}, {}, {0: "fault of row 4"}]
        numbers = [(request.number, kept.number) for request, kept in pool.readmitted]
        assert numbers == [(0, 0), (1, 1), (2, 2)]
        assert pool.submitted == []
