"""A reward model on several ranks: rank 0 deals out the micro-batches of a call and gathers the scores.

Ranks that share one copy of the model are a block; there are as many blocks as data-parallel ranks. Rank 0 sends each
block its micro-batches, and every rank of it runs its part of the model on them. One rank of each block, on the last
stage of the pipeline, sends the scores back; the others report that they are done. Rank 0 sends the next call after
the last of them, so no rank is ever ahead of another.
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
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch

from reinforce_rl.errors import EXIT_ERROR, EXIT_LOST_RANK, ModelStuckError, RankLostError, RewardServerError
from reinforce_rl.reward_model.scorer import Batching, Merging, MicroBatch, share
from reinforce_rl.rewards.base import AttributeScores
from reinforce_rl.runtime.links import Buffer, Invitation, Links, LinkThread, host_of_rank_0
from reinforce_rl.utils.process import die_with_parent

if TYPE_CHECKING:
    from typing_extensions import Self

    from reinforce_rl.megatron.mesh import Mesh

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0  # ranks of a large job do not start at the same moment

LOADED, SCORE, ANSWER, STOP = b"loaded", b"score", b"answer", b"stop"  # kinds of messages


@dataclass(frozen=True)
class Member:
    """A rank, as the others know it.

    Attributes:
        rank: in the whole job.
        block: which copy of the model it holds a part of.
        speaks: whether it is the one of its block that reports the scores.
        host: where it runs.
        pid: its process there.
    """

    rank: int
    block: int
    speaks: bool
    host: str = field(default_factory=gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


class BlockModel(Protocol):
    """This rank's part of a reward model.

    Attributes:
        max_length: the longest sequence, in tokens.
        vocab_size: token ids are 0 .. vocab_size-1.
        batching: how a call is cut.
        attributes: names of the K scores; none where the only one is the reward.
        merging: of the K scores into the reward.
    """

    max_length: int
    vocab_size: int
    batching: Batching
    attributes: tuple[str, ...]
    merging: Merging

    def score_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        """Scores [n, K] of all n sequences, in order; empty where this rank is not on the last stage.

        A collective call over the block. Nothing of it is still going on when it returns or raises.
        """
        ...


@dataclass
class _Call:
    """What rank 0 waits for."""

    number: int
    due: dict[int, float]  # until when each rank that has not answered may do so, by time.monotonic
    scores: dict[int, np.ndarray] = field(default_factory=dict)  # of each block
    failures: dict[int, str] = field(default_factory=dict)  # of each rank


class DistributedScorer:
    """An `AttributeScorer` on rank 0 that computes on all ranks. Leaving its `with` block ends the other ranks.

    Where a rank was lost, leaving the block ends this process with exit code 76: its threads may wait in a collective
    for the lost rank for ever.

    Args:
        me: this rank.
        links: to the other ranks.
        others: the other ranks.
        load: makes this rank's part of the model. The others are watched meanwhile.
        rank_timeout: seconds of silence after which a rank counts as lost.
        call_timeout: seconds that the ranks have for one call.

    Raises:
        RankLostError: a rank died or hung before all were ready.
        RewardServerError: the model cannot score a single token.
    """

    def __init__(
        self,
        me: Member,
        links: Links,
        others: Sequence[Member],
        load: Callable[[], BlockModel],
        *,
        rank_timeout: float = 60.0,
        call_timeout: float = 600.0,
    ):
        self._members = {member.rank: member for member in (me, *others)}
        self._num_blocks = 1 + max(member.block for member in self._members.values())
        self._links, self._rank_timeout, self._call_timeout = links, rank_timeout, call_timeout
        self._changed = threading.Condition()  # guards what follows
        self._lost: RankLostError | None = None
        self._call: _Call | None = None
        self._loading = {member.rank for member in others}
        self._number = 0
        self._one_at_a_time = threading.Lock()
        self._watch = LinkThread(links, rank_timeout, self._on_message, self._on_lost)
        self.model = load()
        self.max_length, self.vocab_size = self.model.max_length, self.model.vocab_size
        self.attributes = self.model.attributes
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or self._lost is not None)
        self.check()
        self._jobs: queue.SimpleQueue[tuple[int, Sequence[MicroBatch]] | None] = queue.SimpleQueue()
        # A thread of its own, because a caller must get an answer also while this rank waits for a lost one.
        self._worker = threading.Thread(target=self._work, args=(me,), daemon=True, name="rank-0-model")
        self._worker.start()
        # Each copy of the model once, so that none is first tried by a client's request.
        self._run({block: self.model.batching.plan([[0]]) for block in range(self._num_blocks)})

    def score(self, sequences: list[list[int]]) -> list[float]:
        """One reward a sequence, in order. Micro-batches follow from the list's content alone, not from the ranks.

        Raises:
            RankLostError: a rank is gone; there will be no scores any more.
            RewardServerError: the model raised on a rank; later calls may succeed.
        """
        return self.score_attributes(sequences).rewards

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        """As `score`, with the scores that each reward was merged from."""
        micro_batches = self.model.batching.plan(sequences)
        with self._one_at_a_time:
            dealt = share(micro_batches, self._num_blocks)
            found = self._run({b: [micro_batches[i] for i in own] for b, own in enumerate(dealt) if own})
        rows = np.concatenate([micro_batches[i].rows for own in dealt for i in own])
        scores = np.empty_like(found)
        scores[rows] = found
        return AttributeScores(self.model.merging(torch.from_numpy(scores)).tolist(), scores.tolist())

    def check(self) -> None:
        """Raises RankLostError where a rank is gone."""
        with self._changed:
            if self._lost is not None:
                raise self._lost

    def _run(self, jobs: dict[int, list[MicroBatch]]) -> np.ndarray:
        """Scores [n, K] of the blocks' sequences, block after block."""
        self.check()
        with self._changed:
            self._number += 1
            due = time.monotonic() + self._call_timeout
            asked = [member.rank for member in self._members.values() if member.block in jobs]
            call = self._call = _Call(self._number, dict.fromkeys(asked, due))
        for rank in asked:
            own = jobs[self._members[rank].block]
            if rank == 0:
                self._jobs.put((call.number, own))
            else:
                self._links.send(rank, SCORE, *_pack(call.number, own))
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
            raise RewardServerError(self._failures_of(call))
        for block, own in jobs.items():
            count = sum(len(one.lengths) for one in own)
            if len(call.scores[block]) != count:
                raise RewardServerError(f"block {block} gave {len(call.scores[block])} scores for {count} sequences")
        return np.concatenate([call.scores[block] for block in jobs])

    def _why_given_up(self, call: _Call) -> str:
        now = time.monotonic()
        late = " and ".join(str(self._members[rank]) for rank, due in sorted(call.due.items()) if due <= now)
        if not call.failures:
            return f"{late} hangs: no scores within {self._call_timeout:.0f} s (inference.stuck_seconds)"
        return f"{self._failures_of(call)}, and since then {late} waits for it in vain: the ranks are out of step"

    def _failures_of(self, call: _Call) -> str:
        return "; ".join(f"{self._members[rank]} failed ({why})" for rank, why in sorted(call.failures.items()))

    def _work(self, me: Member) -> None:
        while (job := self._jobs.get()) is not None:
            self._on_message(0, _score(self.model, *job, me))

    def _on_message(self, rank: int, parts: Sequence[Buffer]) -> None:
        with self._changed:
            if parts[0] == LOADED:
                self._loading.discard(rank)
            else:
                header, call = json.loads(bytes(parts[1])), self._call
                # An answer after its call was given up comes too late for anybody.
                if call is not None and call.number == header["call"]:
                    self._take(call, self._members[rank], header, parts[2:])
            self._changed.notify_all()

    def _take(self, call: _Call, member: Member, header: dict[str, Any], arrays: Sequence[Buffer]) -> None:
        call.due.pop(member.rank, None)
        if "error" in header:
            call.failures[member.rank] = header["error"]
            # Those that wait for this one in a collective will never answer.
            soon = time.monotonic() + self._rank_timeout
            for rank, due in call.due.items():
                if self._members[rank].block == member.block:
                    call.due[rank] = min(due, soon)
        elif member.speaks:
            call.scores[member.block] = np.frombuffer(arrays[0], np.float64).reshape(header["shape"])

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            self._lose(f"{self._members[rank]} {reason}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = RankLostError(f"{reason}. The reward server ends; clients wait and retry, so start it again")
            logger.error("event=rank_lost reason=%s", reason)
        self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lost is not None:
            end_process(str(self._lost))
        if isinstance(error, ModelStuckError):
            end_process(str(error), EXIT_ERROR)
        self.close()

    def close(self) -> None:
        """Have the other ranks end, and wait for that."""
        self._jobs.put(None)
        self._watch.stopping.set()
        self._links.send_all(STOP)
        deadline = time.monotonic() + self._rank_timeout
        for rank in self._watch.wait_closed(self._rank_timeout):
            logger.warning("event=rank_does_not_end rank=%s", self._members[rank])
        self._watch.close()
        self._worker.join(max(0.0, deadline - time.monotonic()))


def follow(
    me: Member,
    links: Links,
    leader: Member,
    load: Callable[[], BlockModel],
    *,
    rank_timeout: float = 60.0,
    end: Callable[[str], object] | None = None,
) -> None:
    """Compute for rank 0 until it says stop.

    Args:
        me: this rank.
        links: to rank 0.
        leader: rank 0.
        load: makes this rank's part of the model.
        rank_timeout: seconds of silence after which rank 0 counts as lost.
        end: ends the process when rank 0 is lost, on a thread that is not this one.
    """
    inbox: queue.SimpleQueue[Sequence[Buffer]] = queue.SimpleQueue()
    watch = LinkThread(
        links,
        rank_timeout,
        lambda rank, parts: inbox.put(parts),
        lambda rank, reason: (end or end_process)(f"{leader} {reason}; {me} ends"),
    )
    model = load()
    links.send(0, LOADED)
    while (parts := inbox.get())[0] != STOP:
        links.send(0, *_score(model, *_unpack(parts), me))
    watch.close()


def lead_ranks(
    mesh: Mesh, load: Callable[[], BlockModel], *, rank_timeout: float, call_timeout: float
) -> DistributedScorer:
    """On rank 0 of a job of several: meet the others, which call `follow_rank_0`. A collective call."""
    _remove_folder_of_torchrun()
    me = _member_of(mesh)
    links, invitation = Links.listen(host_of_rank_0())
    mesh.from_main((invitation, me))
    others = accept(links, mesh.world_size - 1, CONNECT_SECONDS)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Else the server would go on as an orphan, with nobody to stop it, when torchrun is killed.
        die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        return DistributedScorer(me, links, others, load, rank_timeout=rank_timeout, call_timeout=call_timeout)
    except RankLostError as error:
        end_process(str(error))


def follow_rank_0(mesh: Mesh, load: Callable[[], BlockModel], *, rank_timeout: float) -> None:
    """On every other rank: compute until rank 0 says stop; the process ends where rank 0 is gone. A collective call.

    SIGTERM and SIGINT are ignored: torchrun and terminals send them to every rank, and rank 0 needs the others until
    the last call is answered.
    """
    _remove_folder_of_torchrun()
    invitation, leader = mesh.from_main(None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    me = _member_of(mesh)
    follow(me, connect(invitation, me, CONNECT_SECONDS), leader, load, rank_timeout=rank_timeout)


def accept(links: Links, count: int, seconds: float) -> list[Member]:
    """Wait for this many other ranks, on rank 0.

    Raises:
        RewardServerError: not all came in time.
    """
    hellos = links.accept(range(1, count + 1), seconds)
    if len(hellos) < count:
        links.close()
        raise RewardServerError(
            f"only {len(hellos)} of {count} ranks connected to rank 0 within {seconds:.0f} s: {sorted(hellos)}"
        )
    return [Member(**json.loads(hellos[rank])) for rank in sorted(hellos)]


def connect(invitation: Invitation, me: Member, seconds: float) -> Links:
    """This rank's connection to rank 0.

    Raises:
        RewardServerError: it cannot be reached.
    """
    try:
        return Links.connect(invitation, me.rank, json.dumps(asdict(me)).encode(), seconds)
    except ConnectionError as error:
        raise RewardServerError(
            f"{me} cannot reach rank 0 at {invitation.host}:{invitation.port} ({error}); ranks of a reward server "
            "need TCP connections to the host of rank 0"
        ) from error


def end_process(reason: str, code: int = EXIT_LOST_RANK) -> NoReturn:
    """End this process at once with this exit code, whatever its threads wait for."""
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {reason}", file=sys.stderr, flush=True)
        logging.shutdown()
    os._exit(code)


def _remove_folder_of_torchrun() -> None:
    """torchrun makes a temporary folder for reports that nothing here writes, and never removes it."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if report and os.environ.get("LOCAL_RANK") == "0":
        for folder in Path(report).parents:
            if folder.name.startswith("torchelastic_"):
                shutil.rmtree(folder, ignore_errors=True)


def _member_of(mesh: Mesh) -> Member:
    return Member(mesh.rank, mesh.dp_rank, mesh.is_last_stage and mesh.tp_rank == 0)


def _score(model: BlockModel, number: int, micro_batches: Sequence[MicroBatch], me: Member) -> list[Buffer]:
    """This rank's part of a call, as the parts of a message."""
    try:
        scores = np.asarray(model.score_micro_batches(micro_batches), np.float64)
    except Exception as error:
        logger.exception("event=rank_failed rank=%s", me)
        return [ANSWER, json.dumps({"call": number, "error": f"{type(error).__name__}: {error}"}).encode()]
    if not me.speaks:
        scores = np.zeros(0)
    return [ANSWER, json.dumps({"call": number, "shape": scores.shape}).encode(), np.ascontiguousarray(scores).data]


def _pack(number: int, micro_batches: Sequence[MicroBatch]) -> list[Buffer]:
    """A call as parts of a message: its number, then lengths and tokens of each micro-batch."""
    arrays = [array for one in micro_batches for array in (one.lengths, one.tokens)]
    return [json.dumps({"call": number}).encode(), *(np.ascontiguousarray(array, np.int64).data for array in arrays)]


def _unpack(parts: Sequence[Buffer]) -> tuple[int, list[MicroBatch]]:
    arrays = [np.frombuffer(part, np.int64).copy() for part in parts[2:]]  # torch wants to own them
    micro_batches = [
        MicroBatch(np.arange(len(lengths)), tokens.reshape(len(lengths), -1), lengths)
        for lengths, tokens in zip(arrays[::2], arrays[1::2], strict=True)
    ]
    return json.loads(bytes(parts[1]))["call"], micro_batches
