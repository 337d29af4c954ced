"""A reward model on several ranks: rank 0 deals out the micro-batches of a call and gathers the
scores.

The ranks that share one copy of the model are a block; there is one block per data-parallel rank.
Per call, one rank of each block, on the last pipeline stage, returns the scores and the others
report completion, so none runs ahead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from reinforce_rl.errors import (
    EXIT_ERROR,
    EXIT_LOST_RANK,
    Fault,
    ModelStuckError,
    RankLostError,
    RewardServerError,
)
from reinforce_rl.reward_model.scorer import MegatronRewardModel, MicroBatch, share
from reinforce_rl.rewards.base import AttributeScores
from reinforce_rl.runtime.links import Buffer, Invitation, Links, LinkThread
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.process import die_with_parent

if TYPE_CHECKING:
    from typing_extensions import Self

    from reinforce_rl.megatron.mesh import Mesh

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0  # ranks of a large job do not start at the same moment

Load = Callable[[], MegatronRewardModel]  # builds this rank's part of the model

# kinds of messages
LOADED = b"loaded"
SCORE = b"score"
ANSWER = b"answer"
STOP = b"stop"


@dataclass(frozen=True)
class ScorerRank:
    """A rank, as the others know it."""

    rank: int  # in the whole job
    block: int  # which copy of the model it holds a part of
    speaks: bool  # returns the block's scores
    host: str = field(default_factory=gethostname)
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def of(cls, mesh: Mesh) -> ScorerRank:
        return cls(mesh.rank, mesh.dp_rank, mesh.is_last_stage and mesh.tp_rank == 0)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass
class _Call:
    number: int
    due: dict[int, float]  # deadline of each rank that has not answered, in time.monotonic
    scores: dict[int, np.ndarray] = field(default_factory=dict)  # by block
    failures: dict[int, str] = field(default_factory=dict)  # by rank


class DistributedScorer:
    """An `AttributeScorer` on rank 0 that computes on all ranks. Leaving its `with` block ends the
    other ranks.

    If a rank was lost, leaving the block ends this process with exit code 76, since its threads may
    wait in a collective for the lost rank for ever.

    A rank is lost after `rank_timeout` seconds of silence, or `call_timeout` seconds without the
    scores of a call. The others are watched during `load` too.

    Raises RankLostError if a rank died or hung before all were ready, RewardServerError if the
    model cannot score a single token.
    """

    def __init__(
        self,
        me: ScorerRank,
        links: Links,
        others: list[ScorerRank],
        load: Load,
        *,
        rank_timeout: float,
        call_timeout: float,
    ):
        self._members = {member.rank: member for member in (me, *others)}
        self._num_blocks = 1 + max(member.block for member in self._members.values())
        self._links = links
        self._rank_timeout = rank_timeout
        self._call_timeout = call_timeout
        self._changed = threading.Condition()  # guards what follows
        self._lost: RankLostError | None = None
        self._call: _Call | None = None
        self._loading = {member.rank for member in others}
        self._number = 0
        self._one_at_a_time = threading.Lock()
        self._watch = LinkThread(links, rank_timeout, self._on_message, self._on_lost)
        self.model = load()
        self.max_length = self.model.max_length
        self.vocab_size = self.model.vocab_size
        self.attributes = self.model.attributes
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or self._lost is not None)
        self.check()
        self._jobs: queue.SimpleQueue[tuple[int, Sequence[MicroBatch]] | None] = queue.SimpleQueue()
        # In its own thread, so that a caller gets an error even while this rank waits for a lost
        # one.
        self._worker = threading.Thread(
            target=self._work, args=(me,), daemon=True, name="rank-0-model"
        )
        self._worker.start()
        # Warm up each copy of the model once, before the first request.
        self._run({block: self.model.batching.plan([[0]]) for block in range(self._num_blocks)})

    def score(self, sequences: list[list[int]]) -> list[float]:
        """Return one reward per sequence, in order. Micro-batches depend on the list's content
        only, not on the ranks.

        Raises RankLostError if a rank is gone, so no call can succeed any more, and
        RewardServerError if the model raised on a rank.
        """
        return self.score_attributes(sequences).rewards

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        """Score as `score` does, and return the attributes too."""
        micro_batches = self.model.batching.plan(sequences)
        with self._one_at_a_time:
            dealt = share(micro_batches, self._num_blocks)
            dealt_scores = self._run(
                {
                    b: [micro_batches[i] for i in numbers]
                    for b, numbers in enumerate(dealt)
                    if numbers
                }
            )
        rows = np.concatenate([micro_batches[i].rows for numbers in dealt for i in numbers])
        scores = np.empty_like(dealt_scores)
        scores[rows] = dealt_scores
        return AttributeScores(
            self.model.merging(torch.from_numpy(scores)).tolist(), scores.tolist()
        )

    def check(self) -> None:
        """Raise RankLostError if a rank is gone."""
        with self._changed:
            if self._lost is not None:
                raise self._lost

    def _run(self, jobs: dict[int, list[MicroBatch]]) -> np.ndarray:
        """Return scores [n, K] of the blocks' sequences, block after block."""
        self.check()
        with self._changed:
            self._number += 1
            due = time.monotonic() + self._call_timeout
            asked = [member.rank for member in self._members.values() if member.block in jobs]
            call = _Call(self._number, dict.fromkeys(asked, due))
            self._call = call
        for rank in asked:
            job = jobs[self._members[rank].block]
            if rank == 0:
                self._jobs.put((call.number, job))
            else:
                self._links.send(rank, SCORE, *_pack(call.number, job))
        with self._changed:
            while call.due and self._lost is None:
                left = min(call.due.values()) - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._lose(self._why_given_up(call))
            self._call = None
        self.check()
        if call.failures:
            raise RewardServerError(self._failures_of(call), key="serve.rank.failed")
        for block, job in jobs.items():
            received = len(call.scores[block])
            count = sum(len(micro_batch.lengths) for micro_batch in job)
            if received != count:
                raise RewardServerError(
                    f"block {block} gave {received} scores for {count} sequences",
                    key="serve.rank.wrong_number_of_scores",
                )
        return np.concatenate([call.scores[block] for block in jobs])

    def _why_given_up(self, call: _Call) -> Fault:
        now = time.monotonic()
        late = " and ".join(
            str(self._members[rank]) for rank, due in sorted(call.due.items()) if due <= now
        )
        if call.failures:
            return Fault(
                f"{self._failures_of(call)}, and {late} has been waiting for it since: the ranks "
                "are out of step",
                key="serve.ranks.out_of_step",
            )
        return Fault(
            f"{late} hangs: no scores within {self._call_timeout:.0f} s "
            "(inference.model_timeout_seconds)",
            key="serve.rank.hangs",
        )

    def _failures_of(self, call: _Call) -> str:
        return "; ".join(
            f"{self._members[rank]} failed ({why})" for rank, why in sorted(call.failures.items())
        )

    def _work(self, me: ScorerRank) -> None:
        while (job := self._jobs.get()) is not None:
            self._on_message(0, _score(self.model, *job, me))

    def _on_message(self, rank: int, parts: Sequence[Buffer]) -> None:
        with self._changed:
            if parts[0] == LOADED:
                self._loading.discard(rank)
            else:
                header = json.loads(bytes(parts[1]))
                call = self._call
                # Drop answers to calls that were given up.
                if call is not None and call.number == header["call"]:
                    self._take(call, self._members[rank], header, parts[2:])
            self._changed.notify_all()

    def _take(
        self, call: _Call, member: ScorerRank, header: dict[str, Any], arrays: Sequence[Buffer]
    ) -> None:
        call.due.pop(member.rank, None)
        if "error" in header:
            call.failures[member.rank] = header["error"]
            # The rest of its block may hang in a collective with it: shorten their deadlines.
            soon = time.monotonic() + self._rank_timeout
            for rank, due in call.due.items():
                if self._members[rank].block == member.block:
                    call.due[rank] = min(due, soon)
        elif member.speaks:
            call.scores[member.block] = np.frombuffer(arrays[0], np.float64).reshape(
                header["shape"]
            )

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            self._lose(Fault(f"{self._members[rank]} {reason}", key="serve.rank.lost"))

    def _lose(self, reason: Fault) -> None:
        if self._lost is None:
            self._lost = RankLostError(
                f"{reason}. The reward server ends; clients wait and retry, so start it again",
                key=reason.key,
            )
            logger.error("event=rank_lost reason=%s", reason)
        self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._lost is not None:
            end_process(self._lost.with_keys())
        if isinstance(error, ModelStuckError):
            end_process(error.with_keys(), EXIT_ERROR)
        self.close()

    def close(self) -> None:
        """Stop the other ranks and wait for their end."""
        self._jobs.put(None)
        self._watch.stopping.set()
        self._links.send_all(STOP)
        deadline = time.monotonic() + self._rank_timeout
        for rank in self._watch.wait_closed(self._rank_timeout):
            logger.warning("event=rank_does_not_end rank=%s", self._members[rank])
        self._watch.close()
        self._worker.join(max(0.0, deadline - time.monotonic()))


def follow(
    me: ScorerRank,
    links: Links,
    rank_0: ScorerRank,
    load: Load,
    rank_timeout: float,
    end: Callable[[str], object],
) -> None:
    """Compute for `rank_0` until it sends STOP.

    After `rank_timeout` seconds of silence rank 0 is lost: then `end` ends the process, called on
    another thread.
    """
    inbox: queue.SimpleQueue[Sequence[Buffer]] = queue.SimpleQueue()

    def on_lost(rank: int, reason: str) -> None:
        lost = RankLostError(f"{rank_0} {reason}; {me} ends", key="serve.rank.lost")
        end(lost.with_keys())

    watch = LinkThread(links, rank_timeout, lambda rank, parts: inbox.put(parts), on_lost)
    model = load()
    links.send(0, LOADED)
    while (parts := inbox.get())[0] != STOP:
        links.send(0, *_score(model, *_unpack(parts), me))
    watch.close()


def lead_ranks(
    mesh: Mesh, load: Load, *, rank_timeout: float, call_timeout: float
) -> DistributedScorer:
    """Connect rank 0 to the others, which call `follow_rank_0`. A collective call."""
    _remove_folder_of_torchrun()
    me = ScorerRank.of(mesh)
    links, invitation = Links.listen(JobRank.of_process().host_of_first)
    mesh.from_main((invitation, me))
    others = accept(links, mesh.world_size - 1, CONNECT_SECONDS)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Else the server would survive as an orphan when torchrun is killed.
        die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        return DistributedScorer(
            me, links, others, load, rank_timeout=rank_timeout, call_timeout=call_timeout
        )
    except RankLostError as error:
        end_process(error.with_keys())


def follow_rank_0(mesh: Mesh, load: Load, *, rank_timeout: float) -> None:
    """Compute on another rank until rank 0 sends STOP; the process ends if rank 0 is lost.

    A collective call.
    """
    _remove_folder_of_torchrun()
    invitation, rank_0 = mesh.from_main(None)
    # torchrun and terminals send them to every rank, and rank 0 needs the others until the last
    # call is answered.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    me = ScorerRank.of(mesh)
    follow(me, connect(invitation, me, CONNECT_SECONDS), rank_0, load, rank_timeout, end_process)


def accept(links: Links, count: int, seconds: float) -> list[ScorerRank]:
    """Wait on rank 0 for `count` other ranks; raise RewardServerError if not all connect in
    time.
    """
    hellos = links.accept(range(1, count + 1), seconds)
    if len(hellos) < count:
        links.close()
        raise RewardServerError(
            f"only {len(hellos)} of {count} ranks connected to rank 0 within {seconds:.0f} s: "
            f"{sorted(hellos)}",
            key="serve.ranks.missing",
        )
    return [ScorerRank(**json.loads(hellos[rank])) for rank in sorted(hellos)]


def connect(invitation: Invitation, me: ScorerRank, seconds: float) -> Links:
    """Connect this rank to rank 0; raise RewardServerError if it cannot be reached."""
    try:
        return Links.connect(invitation, me.rank, json.dumps(asdict(me)).encode(), seconds)
    except ConnectionError as error:
        raise RewardServerError(f"{me} {error}", key="serve.rank.not_connected") from error


def end_process(reason: str, code: int = EXIT_LOST_RANK) -> NoReturn:
    """End this process at once with this exit code, even if its threads hang."""
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {reason}", file=sys.stderr, flush=True)
        logging.shutdown()
    os._exit(code)


def _remove_folder_of_torchrun() -> None:
    """Remove torchrun's temporary folder for error reports, which nothing writes here and torchrun
    never removes.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if report and JobRank.of_process().local_rank == 0:
        for folder in Path(report).parents:
            if folder.name.startswith("torchelastic_"):
                shutil.rmtree(folder, ignore_errors=True)


def _score(
    model: MegatronRewardModel, number: int, micro_batches: Sequence[MicroBatch], me: ScorerRank
) -> list[Buffer]:
    """Run this rank's part of a call; return the message for rank 0."""
    try:
        scores = np.asarray(model.score_micro_batches(micro_batches), np.float64)
    except Exception as error:
        logger.exception("event=rank_failed rank=%s", me)
        return [
            ANSWER,
            json.dumps({"call": number, "error": f"{type(error).__name__}: {error}"}).encode(),
        ]
    if not me.speaks:
        scores = np.zeros(0)
    return [
        ANSWER,
        json.dumps({"call": number, "shape": scores.shape}).encode(),
        np.ascontiguousarray(scores).data,
    ]


def _pack(number: int, micro_batches: Sequence[MicroBatch]) -> list[Buffer]:
    """Encode a call as parts of a message: its number, then lengths and tokens of each
    micro-batch.
    """
    arrays = [
        array
        for micro_batch in micro_batches
        for array in (micro_batch.lengths, micro_batch.tokens)
    ]
    return [
        json.dumps({"call": number}).encode(),
        *(np.ascontiguousarray(array, np.int64).data for array in arrays),
    ]


def _unpack(parts: Sequence[Buffer]) -> tuple[int, list[MicroBatch]]:
    arrays = [np.frombuffer(part, np.int64).copy() for part in parts[2:]]  # torch wants to own them
    micro_batches = [
        MicroBatch(np.arange(len(lengths)), tokens.reshape(len(lengths), -1), lengths)
        for lengths, tokens in zip(arrays[::2], arrays[1::2], strict=True)
    ]
    return json.loads(bytes(parts[1]))["call"], micro_batches
