"""Weights that each step's rollouts use, log-probs of the KL, and the state of rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises_error
from torch import Tensor

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import Completions, Prompt, RolloutBatch
from reinforce_rl.data.sampler import step_seed
from reinforce_rl.errors import StoppedEarly
from reinforce_rl.rewards.base import STATUS_OK, Rewards
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.messages import GenerationResult
from reinforce_rl.rollout.remote import RemoteRollouts
from reinforce_rl.rollout.scoring import RolloutScorer, unscored_batch
from reinforce_rl.rollout.source import RolloutContext, RolloutHandle
from reinforce_rl.runtime.stop import StopRequest

STATUS_BAD = 1 if STATUS_OK != 1 else 2
SEED = 7


class OnePass:
    """A clock that measures nothing."""

    @contextlib.contextmanager
    def phase(self, name: str, *, has_deadline: bool = False) -> Iterator[None]:
        yield


class OneRank:
    """The mesh of a single rank."""

    dp_rank = 0
    dp_size = 1
    world_size = 1
    is_model_parallel_rank_0 = True
    is_main = True

    def gather_over_dp(self, value: Any) -> list[Any]:
        return [value]

    def sum_over_dp(self, value: Tensor) -> Tensor:
        return value

    def from_model_parallel_rank_0(self, value: Any) -> Any:
        return value

    def from_main(self, value: Any) -> Any:
        return value

    def raise_if_any(self, failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    def any_rank(self, value: bool) -> bool:
        return value

    def raise_on_all_ranks(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Loader:
    """Prompts 0, 1, 2, ..., two a step."""

    prompts_per_step = 2

    def __init__(self) -> None:
        self.drawn = 0

    finished = False

    def __next__(self) -> list[Prompt]:
        first = self.drawn
        self.drawn += self.prompts_per_step
        return self.share(range(first, self.drawn))

    def share(self, ids: Sequence[int]) -> list[Prompt]:
        return [Prompt(number, "", (3,)) for number in ids]

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_prompts": self.drawn}


def result_of(
    number: int, prompt: Prompt, versions: Sequence[int], status: int = STATUS_OK
) -> GenerationResult:
    """One response with a score; it has one token a version."""
    width = len(versions)
    completions = Completions(
        tokens=torch.full((1, width + 2), 5),  # two columns of padding
        lengths=torch.tensor([width]),
        finish_reasons=("stop",),
        log_probs=torch.full((1, width + 2), -1.0),
        weight_versions=torch.tensor([[*versions, 0, 0]]),
    )
    values = torch.tensor([1.0 if status == STATUS_OK else float("nan")])
    rewards = Rewards(values, torch.tensor([status], dtype=torch.int32))
    return GenerationResult(number, (prompt.id,), completions, rewards)


class RecordedGenerators:
    """Records requests and answers each prompt with tokens of the requested version."""

    def __init__(self, *, takes_finished: bool = False) -> None:
        self.takes_finished = takes_finished
        self.version = 0
        self.asked: list[tuple[int, int, int]] = []  # step, version, seed
        self.oldest: list[int] = []  # passed to `collect_first`
        self.kept: dict[int, RolloutHandle] = {}
        # versions of each answer's tokens; empty: one token, as asked
        self.drawn_with: list[list[int]] = []
        self.published: list[tuple[int, bool]] = []
        self.is_stopped = False
        self._prompts: dict[int, Prompt] = {}

    def submit(
        self, prompts: Sequence[Prompt], num_samples: int, seed: int, step: int, version: int
    ) -> RolloutHandle:
        self.asked.append((step, version, seed))
        numbers = [len(self._prompts) + i for i in range(len(prompts))]
        self._prompts.update(zip(numbers, prompts, strict=True))
        return RolloutHandle([numbers], version)

    def publish(self, version: int, *, as_oldest: bool = False) -> None:
        self.version = version
        self.published.append((version, as_oldest))

    def collect(self, handle: RolloutHandle, prompts: Sequence[Prompt]) -> list[GenerationResult]:
        if self.is_stopped:
            raise StoppedEarly("stopped by a test", key="run.stop.by_signal")
        of_prompts = self.drawn_with or [[handle.version]] * len(prompts)
        rows = zip(handle.numbers[0], prompts, of_prompts, strict=True)
        return [result_of(number, prompt, versions) for number, prompt, versions in rows]

    def collect_first(
        self, numbers: Sequence[int], count: int, oldest: int
    ) -> tuple[list[GenerationResult], int]:
        self.oldest.append(oldest)
        taken = numbers[:count]
        return [result_of(number, self._prompts[number], [oldest]) for number in taken], 0

    def forget(self, handle: RolloutHandle) -> None:
        pass

    def state(self, handles: dict[int, RolloutHandle]) -> bytes:
        self.kept = handles
        return b""

    def restore(self, content: bytes) -> dict[int, RolloutHandle]:
        return self.kept if content else {}


class Policy:
    """Log-probs that name the model: -2 is the policy, -3 the reference."""

    pad_id = 0

    def __init__(self, *, is_exact: bool = True) -> None:
        self.mesh = OneRank()
        self.settings = SimpleNamespace(seed=SEED)
        self.refits = 0
        self.is_closed = False
        self.generator = SimpleNamespace(
            is_exact=is_exact,
            awake=contextlib.nullcontext,
            refit=self._refit,
            close=self._close,
        )
        self.passes: list[str] = []
        self.seeds: list[int] = []  # of each call of `infer`

    def _refit(self) -> None:
        self.refits += 1

    def _close(self) -> None:
        self.is_closed = True

    def infer(
        self, prompts: Sequence[Prompt], num_samples: int, seed: int, *, validation: bool
    ) -> Completions:
        self.seeds.append(seed)
        count = len(prompts) * num_samples
        tokens = torch.full((count, 1), 5)
        lengths = torch.ones(count, dtype=torch.long)
        return Completions(tokens, lengths, ("stop",) * count)

    def get_inference_log_probs(
        self, sequences: Tensor, prompts: Tensor, lengths: Tensor, groups: Tensor, *masks: None
    ) -> Tensor:
        self.passes.append("policy")
        return torch.full((len(lengths), int(lengths.max())), -2.0)

    def get_init_policy_logprobs(
        self, sequences: Tensor, prompts: Tensor, lengths: Tensor, groups: Tensor, *masks: None
    ) -> Tensor:
        self.passes.append("reference")
        return torch.full((len(lengths), int(lengths.max())), -3.0)


def context_of(
    staleness: int = 0,
    *,
    max_steps: int = 100,
    is_exact: bool = True,
    has_ratios: bool = False,
    **keys: Any,
) -> RolloutContext:
    settings: Any = {"num_rollouts_per_prompt": 1, "initial_policy_kl_penalty": 0.1, **keys}
    parts: Any = {"clock": OnePass(), "stop": StopRequest(), "rm": None}
    return RolloutContext(
        cfg=ReinforceConfig(**settings),
        model=Policy(is_exact=is_exact),  # type: ignore[arg-type]
        batch_iterator_cls=lambda prompts, validation: [prompts],
        loader=Loader(),  # type: ignore[arg-type]
        staleness=staleness,
        max_steps=max_steps,
        has_ratios=has_ratios,
        **parts,
    )


def remote_of(staleness: int, generators: RecordedGenerators, **settings: Any) -> RemoteRollouts:
    return RemoteRollouts(context_of(staleness, **settings), generators)  # type: ignore[arg-type]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_each_step_asks_for_weights_of_exactly_so_many_steps_before(staleness):
    """Step s trains weights of s - 1 updates.

    Its tokens come from weights of `staleness` updates before, at least 0.
    """
    generators = RecordedGenerators()
    source = remote_of(staleness, generators, max_steps=6)
    for step in range(1, 7):
        generators.version = step - 1
        made = source.next_batch(step)
        if staleness:
            assert made.metrics["staleness"] == min(staleness, step - 1)
        else:
            assert "staleness" not in made.metrics
        # Requests stay within the bound, and end with the run's last step.
        num_asked = len({number for number, _, _ in generators.asked})
        assert num_asked == min(step + staleness, 6)
    expected = {}
    for step in range(1, 7):
        updates_before = step - 1
        expected[step] = max(0, updates_before - staleness)
    assert {step: version for step, version, _ in generators.asked} == expected


def test_every_step_has_a_seed_of_its_own():
    generators = RecordedGenerators()
    source = remote_of(1, generators, max_steps=5)
    for step in range(1, 6):
        source.next_batch(step)
    seeds = [seed for _, _, seed in generators.asked]
    assert len(set(seeds)) == 5
    assert step_seed(SEED, 3) == seeds[2], "generated here, a step has the same noise"


def test_the_staleness_of_a_step_is_the_mean_age_of_its_tokens():
    """Padding does not count; its version is 0 here."""
    generators = RecordedGenerators()
    generators.drawn_with = [[3, 4, 4], [4]]
    source = remote_of(2, generators)
    made = source.next_batch(6)  # of weights after 5 updates: ages 2, 1, 1 and 1
    assert made.metrics["staleness"] == pytest.approx(5 / 4)


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_oldest_weights_that_a_step_takes_are_so_many_steps_old(staleness):
    generators = RecordedGenerators(takes_finished=True)
    source = remote_of(staleness, generators)
    ages = []
    for step in range(1, 5):
        made = source.next_batch(step)
        updates = step - 1
        ages.append(updates - generators.oldest[-1])
        assert made.metrics["staleness"] == staleness
    assert ages == [staleness] * 4


class TestLogProbs:
    """Which policy a batch's log-probs come from. The KL uses them."""

    def batch(self) -> RolloutBatch:
        completions = result_of(0, Prompt(0, "", (3,)), [0, 0]).completions
        return unscored_batch([Prompt(0, "", (3,))], completions, pad_id=0)

    def test_what_is_generated_with_the_present_weights_needs_no_pass(self):
        context = context_of(0)
        batch = RolloutScorer(context).with_log_probs(self.batch())
        assert batch.log_probs is not None
        assert batch.generator_log_probs is not None
        assert torch.equal(batch.log_probs, batch.generator_log_probs)
        assert context.model.passes == ["reference"]  # type: ignore[attr-defined]

    @pytest.mark.parametrize("staleness", [1, 2, 5])
    def test_the_kl_of_older_rollouts_is_that_of_the_present_policy(self, staleness):
        """The generator's log-probs come from the weights `staleness` steps before."""
        context = context_of(staleness)
        batch = RolloutScorer(context).with_log_probs(self.batch())
        assert batch.log_probs is not None
        assert batch.init_log_probs is not None
        assert batch.log_probs.tolist() == [[-2.0, -2.0]]
        assert batch.init_log_probs.tolist() == [[-3.0, -3.0]]
        assert batch.generator_log_probs is not None
        assert batch.generator_log_probs.max() == -1.0

    def test_another_engines_log_probs_are_not_the_policys(self):
        batch = RolloutScorer(context_of(0, is_exact=False)).with_log_probs(self.batch())
        assert batch.log_probs is not None
        assert batch.log_probs.tolist() == [[-2.0, -2.0]]

    def test_ratios_begin_from_the_trainers_own(self):
        batch = RolloutScorer(context_of(0, has_ratios=True)).with_log_probs(self.batch())
        assert batch.log_probs is not None
        assert batch.log_probs.tolist() == [[-2.0, -2.0]]

    def test_ratios_need_them_without_a_kl_too(self):
        context = context_of(0, has_ratios=True, initial_policy_kl_penalty=0.0)
        batch = RolloutScorer(context).with_log_probs(self.batch())
        assert batch.log_probs is not None
        assert batch.init_log_probs is None
        assert context.model.passes == ["policy"]  # type: ignore[attr-defined]

    def test_without_a_kl_and_ratios_there_is_no_pass(self):
        context = context_of(3, initial_policy_kl_penalty=0.0)
        assert RolloutScorer(context).with_log_probs(self.batch()).log_probs is None
        assert context.model.passes == []  # type: ignore[attr-defined]


def test_a_state_has_the_steps_after_its_own():
    """Stopped between steps, a run has the rollouts of steps 3 to 5.

    Stopped within step 3, it still has the rollouts of step 3.
    """
    generators = RecordedGenerators()
    source = remote_of(2, generators)
    source.next_batch(1)
    source.next_batch(2)
    generators.is_stopped = True
    with pytest.raises(StoppedEarly):
        source.next_batch(3)
    source.state_dict()
    assert list(generators.kept) == [3, 4, 5]
    versions = {step: handle.version for step, handle in generators.kept.items()}
    assert versions == {3: 0, 4: 1, 5: 2}
    generators.is_stopped = False
    source.next_batch(3)
    source.state_dict()
    assert list(generators.kept) == [4, 5]


@pytest.mark.parametrize(("failed_after", "asked"), [(2, [5]), (3, [3, 4, 5])])
def test_stored_rollouts_are_those_of_their_own_steps_prompts(
    failed_after: int, asked: list[int]
) -> None:
    """A step that fails after it took its rollouts leaves the later steps' rollouts alone."""
    generators = RecordedGenerators()
    source = remote_of(2, generators)
    for step in range(1, failed_after + 1):
        source.next_batch(step)
    source.state_dict()
    generators.asked.clear()
    resumed = remote_of(2, generators)
    resumed._context.loader.drawn = 4  # type: ignore[attr-defined]
    resumed.load_state_dict({"step": 2, "under_way": [], "rollouts": b"stored"})
    assert resumed.next_batch(3).batch.group_ids.tolist() == [4, 5]
    assert [step for step, _, _ in generators.asked] == asked


def test_prompts_under_way_are_asked_for_as_of_the_steps_after_the_checkpoint():
    generators = RecordedGenerators()
    source = remote_of(2, generators)
    source.load_state_dict({"step": 4, "under_way": [3, 5, 7, 8], "rollouts": b""})
    assert generators.published == [(4, True)]
    asked = [(step, version) for step, version, _ in generators.asked]
    assert asked == [(5, 2), (6, 3)]


def test_samples_without_a_score_are_not_valid_and_groups_are_numbered():
    tokens = torch.ones(4, 2, dtype=torch.long)
    lengths = torch.tensor([2, 1, 2, 2])
    completions = Completions(tokens, lengths, ("stop",) * 4)
    prompts = [Prompt(9, "", (3,)), Prompt(4, "", (3, 3))]
    batch = unscored_batch(prompts, completions, pad_id=0)
    assert batch.group_ids.tolist() == [9, 9, 4, 4]
    assert batch.sample_ids.tolist() == [0, 1, 0, 1]
    assert batch.prompt_lengths.tolist() == [1, 1, 2, 2]
    assert batch.rewards.isnan().all()
    assert not batch.valid.any()


@pytest.mark.parametrize(
    ("failed", "ends"), [(0, False), (1, False), (2, False), (3, True), (4, True)]
)
def test_a_step_may_lack_as_many_scores_as_the_bound_says(failed, ends):
    generators = RecordedGenerators()
    source = remote_of(1, generators, max_failed_fraction=0.5)
    prompts = [Prompt(i, "", (3,)) for i in range(4)]
    results = []
    for i, prompt in enumerate(prompts):
        status = STATUS_BAD if i < failed else STATUS_OK
        results.append(result_of(i, prompt, [0], status))
    pending = source._pending(prompts, results)
    if ends:
        with raises_error("rewards.samples.too_many_failed", "max_failed_fraction = 0.5", "step 1"):
            source._scorer.score(pending, "step 1")
        return
    batch = source._scorer.score(pending, "step 1")
    assert batch.valid.tolist() == [i >= failed for i in range(4)]


def test_scores_of_other_sources_than_the_first_ones_are_kept_beside_them():
    """Rollouts of a checkpoint may have scores of other sources than the current ones."""
    prompts = [Prompt(0, "", (3,)), Prompt(1, "", (3,))]
    results = []
    for number, names in enumerate([("old", "kept"), ("kept", "new")]):
        result = result_of(number, prompts[number], [0], STATUS_OK)
        assert result.rewards is not None
        scores = {name: torch.full((1,), float(number)) for name in names}
        results.append(replace(result, rewards=replace(result.rewards, by_source=scores)))
    source = remote_of(1, RecordedGenerators())
    batch = source._scorer.score(source._pending(prompts, results), "step 1")
    by_source = {}
    for name, values in batch.source_rewards.items():
        by_source[name] = values.nan_to_num(-1).tolist()
    assert by_source == {"old": [0.0, -1.0], "kept": [0.0, 1.0], "new": [-1.0, 1.0]}


class TestLocalRollouts:
    def test_a_step_has_its_prompts_seed_and_position(self):
        context = context_of()
        source = LocalRollouts(context)
        for step in (1, 2):
            rollouts = source.next_batch(step)
            expected_ids = [2 * step - 2, 2 * step - 1]
            ids = [prompt.id for prompt in rollouts.prompts]
            assert ids == expected_ids
            assert rollouts.batch.group_ids.tolist() == expected_ids
            assert rollouts.position == {"consumed_prompts": 2 * step}
        seeds = context.model.seeds  # type: ignore[attr-defined]
        assert seeds == [step_seed(SEED, 1), step_seed(SEED, 2)]

    def test_prompts_that_generators_had_under_way_come_first(self):
        context = context_of()
        source = LocalRollouts(context)
        source.load_state_dict({"step": 4, "under_way": [3, 5, 7], "rollouts": b"of generators"})
        steps = [source.next_batch(step) for step in (5, 6, 7)]
        prompt_ids = [[prompt.id for prompt in step.prompts] for step in steps]
        assert prompt_ids == [[3, 5], [7], [0, 1]]
        under_way = [step.position.get("under_way") for step in steps]
        assert under_way == [[7], [], None]

    def test_a_step_that_was_stopped_is_made_again_of_the_same_prompts(self):
        context = context_of()
        context.loader.finished = True  # type: ignore[misc]
        source = LocalRollouts(context)
        assert source.is_over
        context.stop.reason = "SIGTERM"
        with pytest.raises(StoppedEarly):
            source.next_batch(1)
        assert not source.is_over
        context.stop.reason = None
        ids = [prompt.id for prompt in source.next_batch(1).prompts]
        assert ids == [0, 1]
        assert source.is_over

    def test_weights_are_the_models_own_and_nothing_is_kept(self):
        context = context_of()
        source = LocalRollouts(context)
        source.publish_weights(1)
        source.load_state_dict({"step": 1, "under_way": [], "rollouts": b""})
        assert context.model.refits == 2  # type: ignore[attr-defined]
        assert source.state_dict() == {"rollouts": b""}
        source.close()
        assert context.model.is_closed  # type: ignore[attr-defined]
