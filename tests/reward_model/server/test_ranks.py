"""A reward model on several ranks: equal numbers, and ranks that fail, die or hang."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import check_error, printed_keys, raises_error
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks, one_group

from reinforce_rl.errors import RankLostError, RewardServerError
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.reward_head import POOLINGS, RewardHead
from reinforce_rl.reward_model.scorer import (
    Batching,
    MegatronRewardModel,
    Merging,
    MicroBatch,
    load_reward_model,
    load_trunk,
)
from reinforce_rl.reward_model.server import ranks
from reinforce_rl.reward_model.server.ranks import (
    DistributedScorer,
    ScorerRank,
    accept,
    connect,
    follow,
)
from reinforce_rl.runtime.links import Invitation, Links

FAIL = 101
HANG = 102
MISCOUNT = 103
FAILING_TOKEN = 63


class SumModel:
    """Scores are sums of tokens; the harmful tokens work on the rank `only`."""

    max_length = 32
    vocab_size = 128
    batching = Batching(micro_batch_size=2)

    def __init__(self, me: ScorerRank, only: int = -1, columns: int = 0):
        self._me = me
        self._only = only
        self._columns = max(columns, 1)
        self.attributes = tuple(f"a{column}" for column in range(columns))
        self.merging = Merging.from_names(self.attributes, None)
        self.seen: list[list[int]] = []
        self.hang = threading.Event()

    def score_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        tokens = [
            row[:n].tolist()
            for micro_batch in micro_batches
            for row, n in zip(micro_batch.tokens, micro_batch.lengths, strict=True)
        ]
        self.seen += tokens
        if self._me.rank == self._only or self._only < 0:
            if any(FAIL in row for row in tokens):
                raise MemoryError("no room")
            if any(HANG in row for row in tokens):
                self.hang.wait(60)
            if any(MISCOUNT in row for row in tokens):
                return np.zeros((len(tokens) + 1, self._columns))
        elif any(FAIL in row for row in tokens):
            self.hang.wait(60)  # waiting in a collective for the rank that failed
        sums = np.array([float(sum(row)) for row in tokens])
        return np.stack([sums * (1 + column) for column in range(self._columns)], axis=1)


class Group:
    """Ranks as threads of this process."""

    def __init__(
        self,
        blocks: Sequence[int],
        rank_timeout: float = 2.0,
        call_timeout: float = 30.0,
        **model: Any,
    ):
        members = [
            ScorerRank(r, b, b not in blocks[r + 1 :], f"host{r}", 1000 + r)
            for r, b in enumerate(blocks)
        ]
        self.models = [SumModel(member, **model) for member in members]
        self.ends: dict[int, str] = {}
        self.links: dict[int, Links] = {}
        self.links[0], invitation = Links.listen("127.0.0.1")
        self.threads = [
            threading.Thread(
                target=self._follow,
                args=(invitation, members[0], member, rank_timeout),
                daemon=True,
            )
            for member in members[1:]
        ]
        for thread in self.threads:
            thread.start()
        others = accept(self.links[0], len(blocks) - 1, 10)
        assert others == members[1:]
        self.scorer = DistributedScorer(
            members[0],
            self.links[0],
            others,
            lambda: self.models[0],
            rank_timeout=rank_timeout,
            call_timeout=call_timeout,
        )

    def _follow(
        self, invitation: Invitation, rank_0: ScorerRank, me: ScorerRank, rank_timeout: float
    ) -> None:
        links = connect(invitation, me, 10)
        self.links[me.rank] = links
        end = self.ends.setdefault
        follow(
            me,
            links,
            rank_0,
            lambda: self.models[me.rank],
            rank_timeout,
            lambda reason: end(me.rank, reason),
        )

    def kill(self, rank: int) -> None:
        """Close a rank's connection on its own thread, as the kernel does when a process dies."""
        links = self.links[rank]
        links.poll = lambda seconds: links._socket.close(0) or time.sleep(seconds) or []
        links.wake()

    def mute(self, rank: int) -> None:
        """The process is alive and its connection open, but it sends nothing any more."""
        links = self.links[rank]
        links._flush = lambda: links._outbox.clear()

    def close(self) -> None:
        for model in self.models:
            model.hang.set()
        with contextlib.suppress(RankLostError):
            self.scorer.check()
            self.scorer.close()
            for thread in self.threads:
                thread.join(10)
                assert not thread.is_alive()


@pytest.fixture
def group_of() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(*blocks: int, **options: Any) -> Group:
        groups.append(Group(blocks, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def some_sequences(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 100, length).tolist() for length in rng.integers(1, 30, count)]


@pytest.mark.parametrize("blocks", [(0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)])
def test_every_sequence_goes_to_one_block_and_comes_back_in_its_place(group_of, blocks):
    group = group_of(*blocks)
    for count in (1, 3, 40):
        for model in group.models:
            model.seen.clear()
        sequences = some_sequences(count)
        assert group.scorer.score(sequences) == [sum(sequence) for sequence in sequences]
        of_block = {block: group.models[rank].seen for rank, block in enumerate(blocks)}
        for rank, block in enumerate(blocks):
            assert group.models[rank].seen == of_block[block]
        assert sorted(itertools.chain(*of_block.values())) == sorted(sequences)
        if count == 40:
            tokens = [sum(map(len, seen)) for seen in of_block.values()]
            assert max(tokens) - min(tokens) <= 2 * 2 * 29, "about even, up to a micro-batch"


def test_scores_of_several_columns_come_back_whole(group_of):
    sequences = some_sequences(9)
    scores = group_of(0, 1, 0, 1, columns=3).scorer.score_attributes(sequences)
    assert scores.attributes == [
        [sum(sequence) * (1 + column) for column in range(3)] for sequence in sequences
    ]
    assert scores.rewards == pytest.approx([2 * sum(sequence) for sequence in sequences])


def test_calls_from_many_threads_do_not_mix(group_of):
    scorer = group_of(0, 1).scorer
    wrong = []

    def ask(seed: int) -> None:
        for count in (seed + 1, seed + 5):
            sequences = some_sequences(count)
            if scorer.score(sequences) != [sum(sequence) for sequence in sequences]:
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


@pytest.mark.parametrize("only", [-1, 0, 1])
def test_a_block_that_raises_fails_the_call_and_not_the_next(group_of, only):
    """A block waits for no other, so another block may run longer than the silence limit."""
    group = group_of(0, 1, only=only, rank_timeout=0.5)
    # for both blocks
    scorer = group.scorer
    sequences = [[FAIL, 1], [FAIL, 2], [FAIL, 3], [FAIL, 4]]
    if only < 0:
        values = ["rank 0 (host host0, ", "MemoryError: no room", "rank 1"]
        with raises_error("serve.rank.failed", *values):
            scorer.score(sequences)
    else:
        timer = threading.Timer(1.5, group.models[1 - only].hang.set)
        timer.start()
        values = [f"rank {only} ", "MemoryError: no room"]
        with raises_error("serve.rank.failed", *values) as caught:
            scorer.score(sequences)
        timer.join()
        assert not isinstance(caught.value, RankLostError)
    assert scorer.score([[1, 2], [3], [4], [5]]) == [3, 3, 4, 5]


def test_a_rank_that_waits_for_one_that_failed_ends_the_server(group_of):
    """The ranks are out of step: one rank's next call would meet the other's current call."""
    scorer = group_of(0, 0, only=1, rank_timeout=1.0).scorer
    values = ["rank 1 ", "MemoryError: no room", "rank 0 "]
    with raises_error("serve.ranks.out_of_step", *values) as caught:
        scorer.score([[FAIL]])
    assert isinstance(caught.value, RankLostError)
    with pytest.raises(RankLostError):
        scorer.score([[1]])


def test_a_rank_that_does_not_answer_a_call_is_named(group_of):
    scorer = group_of(0, 1, only=1, call_timeout=1.0).scorer
    with raises_error("serve.rank.hangs", "rank 1 (host host1, process 1001)", "1 s") as caught:
        scorer.score([[HANG, 1], [HANG, 2], [HANG, 3], [HANG, 4]])
    assert isinstance(caught.value, RankLostError)


def test_a_wrong_number_of_scores_is_an_error(group_of):
    scorer = group_of(0, 1, only=1).scorer
    values = ["block 1", "3 scores", "2 sequences"]
    with raises_error("serve.rank.wrong_number_of_scores", *values):
        scorer.score([[MISCOUNT, 1], [MISCOUNT, 2], [MISCOUNT, 3], [MISCOUNT, 4]])


def test_a_rank_that_dies_fails_the_call_under_way_at_once(group_of):
    group = group_of(0, 1, only=1, rank_timeout=60.0)
    timer = threading.Timer(0.3, lambda: group.kill(1))
    timer.start()
    began = time.monotonic()
    with raises_error("serve.rank.lost", "rank 1 (host host1, process 1001)", "died") as caught:
        group.scorer.score([[HANG, 1], [HANG, 2], [HANG, 3], [HANG, 4]])
    assert isinstance(caught.value, RankLostError)
    assert time.monotonic() - began < 30, "by its connection, not by its silence"
    timer.join()


@pytest.mark.parametrize("silent", [0, 1])
def test_an_idle_rank_that_falls_silent_is_found(group_of, silent):
    group = group_of(0, 1, rank_timeout=0.5)
    time.sleep(1.5)
    group.scorer.check()  # both sides send signs of life
    group.mute(silent)
    deadline = time.monotonic() + 20
    with pytest.raises(RankLostError) as caught:
        while time.monotonic() < deadline:
            group.scorer.check()
            time.sleep(0.05)
    if silent == 1:
        check_error(caught.value, "serve.rank.lost", "rank 1 (host host1, process 1001)", "hangs")
    else:
        assert printed_keys(group.ends[1]) == ["serve.rank.lost"]
        assert "rank 0 (host host0, process 1000) hangs" in group.ends[1]


def test_leaving_with_a_lost_rank_ends_the_process(group_of, monkeypatch):
    ended = []
    monkeypatch.setattr(ranks, "end_process", ended.append)
    group = group_of(0, 1)
    with group.scorer:
        group.kill(1)
        group.scorer._changed.acquire()
        group.scorer._changed.wait_for(lambda: group.scorer._lost is not None, 20)
        group.scorer._changed.release()
    assert len(ended) == 1
    assert printed_keys(ended[0]) == ["serve.rank.lost"]
    assert "rank 1" in ended[0]


def test_a_rank_that_never_comes_is_named():
    links, invitation = Links.listen("127.0.0.1")
    second = connect(invitation, ScorerRank(2, 1, True), 10)
    with raises_error("serve.ranks.missing", "1 of 2 ranks", "0 s", "[2]"):
        accept(links, 2, 0.4)
    second.close()
    values = ["rank 1 (host h, process 1)", "rank 0", "refused", "TCP"]
    with raises_error("serve.rank.not_connected", *values):
        connect(invitation, ScorerRank(1, 1, True, "h", 1), 10)


def test_what_comes_with_a_hello_is_not_held_back(monkeypatch):
    """A rank that loads at once may report it before rank 0 has all hellos."""
    links, invitation = Links.listen("127.0.0.1")
    other = connect(invitation, ScorerRank(1, 1, True), 10)
    accept(links, 1, 10)
    links._early = [(1, [memoryview(b"loaded")])]  # as `accept` leaves it
    waits: list[float] = []
    monkeypatch.setattr(
        links._poller, "poll", lambda milliseconds: waits.append(milliseconds) or []
    )
    messages = [(rank, bytes(kind)) for rank, (kind,) in links.poll(60.0)]
    assert messages == [(1, b"loaded")]
    assert waits[0] <= 1
    other.close()
    links.close()


def test_a_large_call_arrives_whole():
    numbers = np.arange(3_000_000, dtype=np.int64)
    links, invitation = Links.listen("127.0.0.1")
    other = connect(invitation, ScorerRank(1, 1, True), 10)
    accept(links, 1, 10)
    other.send(0, b"kind", numbers.data)
    other.poll(0)
    deadline = time.monotonic() + 30
    while not (messages := links.poll(1.0)) and time.monotonic() < deadline:
        pass
    ((rank, (kind, array)),) = messages
    assert rank == 1
    assert bytes(kind) == b"kind"
    np.testing.assert_array_equal(np.frombuffer(array, np.int64), numbers)
    other.close()
    links.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama_folder(folder / "trunk", vocab_size=64)
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
    for pooling in POOLINGS:
        RewardHead(weight, torch.tensor(0.5), pooling).save(folder / f"{pooling}.safetensors")
    return folder


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 63, length).tolist() for length in rng.integers(1, 40, 30)]


class Failing(MegatronRewardModel):
    def score_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        if any((micro_batch.tokens == FAILING_TOKEN).any() for micro_batch in micro_batches):
            raise MemoryError("no memory for this one")
        return super().score_micro_batches(micro_batches)


def score_on_ranks(
    folder: Path, sequences: list[list[int]], layouts: Sequence[tuple[int, int, bool]]
) -> dict[tuple, dict[str, Any]]:
    """Return scores by layout and pooling, before and after a call in which all ranks fail."""
    answers = {}
    with one_group():
        for layout, pooling in itertools.product(layouts, POOLINGS):
            tp, pp, sequence_parallel = layout
            with parallel_mesh(tp, pp, sequence_parallel=sequence_parallel) as mesh:

                def load(mesh=mesh, pooling=pooling) -> Failing:
                    head = RewardHead.load(folder / f"{pooling}.safetensors")
                    trunk = load_trunk(folder / "trunk", mesh)
                    return Failing(trunk, head, batching=Batching(tokens_per_micro_batch=64))

                if not mesh.is_main:
                    ranks.follow_rank_0(mesh, load, rank_timeout=30)
                    continue
                with ranks.lead_ranks(mesh, load, rank_timeout=30, call_timeout=60) as scorer:
                    first = scorer.score(sequences)
                    with pytest.raises(RewardServerError) as caught:
                        scorer.score([[FAILING_TOKEN], *sequences])
                    second = scorer.score(sequences)
                answers[layout, pooling] = {
                    "first": first,
                    "error": str(caught.value),
                    "second": second,
                }
    return answers


def check_layouts(
    folder: Path, sequences, mesh, num_ranks: int, *layouts: tuple[int, int, bool]
) -> None:
    answers = call_on_ranks(score_on_ranks, num_ranks, folder, sequences, layouts, timeout=240)[0]
    for pooling in POOLINGS:
        one_by_one = load_reward_model(
            folder / "trunk",
            folder / f"{pooling}.safetensors",
            mesh,
            batching=Batching(micro_batch_size=1),
        )
        expected = one_by_one.score(sequences)
        assert np.std(expected) > 0.1
        for layout in layouts:
            scores = answers[layout, pooling]
            np.testing.assert_allclose(scores["first"], expected, atol=1e-5, err_msg=str(layout))
            assert scores["second"] == scores["first"]
            # All ranks raise; which message comes first is random.
            assert re.search(
                r"rank \d \(host .*failed \(MemoryError: no memory for this one\)", scores["error"]
            )


@pytest.mark.more
def test_two_ranks_score_as_one_does_and_survive_a_failed_call(folder, sequences, mesh):
    layouts = ((2, 1, False), (2, 1, True), (1, 2, False), (1, 1, False))
    check_layouts(folder, sequences, mesh, 2, *layouts)


@pytest.mark.slow
def test_four_ranks_score_as_one_does(folder, sequences, mesh):
    layouts = ((2, 1, False), (2, 2, True), (1, 2, False), (4, 1, False), (1, 1, False))
    check_layouts(folder, sequences, mesh, 4, *layouts)
