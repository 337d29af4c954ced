"""A reward model on several ranks: rank 0 deals out the micro-batches of a call and gathers the scores.

Ranks that share one copy of the model are a block; there are as many blocks as data-parallel ranks. Rank 0 sends each
block its micro-batches, and every rank of it runs its part of the model on them. One rank of each block, on the last
stage of the pipeline, sends the scores back; the others say that they are done. Rank 0 sends the next call after the
last of them, so no rank is ever ahead of another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
import torch

from reinforce_rl.errors import EXIT_ERROR, EXIT_LOST_RANK, ModelStuckError, RankLostError, RewardServerError
from reinforce_rl.reward_model.scorer import Batching, Merging, MicroBatch, pack, share, unpack
from reinforce_rl.reward_server import rank_links
from reinforce_rl.reward_server.rank_links import Link, Listener, Member, connect
from reinforce_rl.rewards.base import AttributeScores
from reinforce_rl.utils.process import die_with_parent

if TYPE_CHECKING:
    from typing_extensions import Self

    from reinforce_rl.megatron.mesh import Mesh

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0  # ranks of a large job do not start at the same moment

_NUMBER = struct.Struct("!q")


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
        connections: of the other ranks.
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
        connections: Sequence[tuple[socket.socket, Member]],
        load: Callable[[], BlockModel],
        *,
        rank_timeout: float = 60.0,
        call_timeout: float = 600.0,
    ):
        self._members = {member.rank: member for member in (me, *(member for _, member in connections))}
        self._num_blocks = 1 + max(member.block for member in self._members.values())
        self._rank_timeout, self._call_timeout = rank_timeout, call_timeout
        self._changed = threading.Condition()  # guards what follows
        self._lost: RankLostError | None = None
        self._call: _Call | None = None
        self._loading = set(self._members) - {me.rank}
        self._number = 0
        self._one_at_a_time = threading.Lock()
        self._links = [
            Link(
                connection,
                member,
                rank_timeout,
                partial(self._on_message, member),
                partial(self._on_lost, member),
            )
            for connection, member in connections
        ]
        for link in self._links:
            link.start()
        self.model = load()
        self.max_length, self.vocab_size = self.model.max_length, self.model.vocab_size
        self.attributes = self.model.attributes
        self._wait_for_others()
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

    def _wait_for_others(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or self._lost is not None)
        self.check()

    def _run(self, jobs: dict[int, list[MicroBatch]]) -> np.ndarray:
        """Scores [n, K] of the blocks' sequences, block after block."""
        self.check()
        with self._changed:
            self._number += 1
            due = time.monotonic() + self._call_timeout
            asked = [member.rank for member in self._members.values() if member.block in jobs]
            call = self._call = _Call(self._number, dict.fromkeys(asked, due))
        packed = {block: _NUMBER.pack(call.number) + pack(own).tobytes() for block, own in jobs.items()}
        for link in self._links:
            if link.peer.block in jobs:
                link.send(rank_links.SCORE, packed[link.peer.block])
        if 0 in jobs:
            self._jobs.put((call.number, jobs[0]))
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
            kind, body = _score(self.model, job[0], job[1], me)
            self._on_message(me, kind, body)

    def _on_message(self, member: Member, kind: int, body: bytes) -> None:
        with self._changed:
            if kind == rank_links.READY:
                self._loading.discard(member.rank)
            elif kind in (rank_links.SCORES, rank_links.FAILED):
                call = self._call
                # An answer after its call was given up comes too late for anybody.
                if call is not None and call.number == _NUMBER.unpack_from(body)[0]:
                    self._take(call, member, kind, body[_NUMBER.size :])
            self._changed.notify_all()

    def _take(self, call: _Call, member: Member, kind: int, body: bytes) -> None:
        call.due.pop(member.rank, None)
        if kind == rank_links.FAILED:
            call.failures[member.rank] = body.decode(errors="replace")
            # Those that wait for this one in a collective will never answer.
            soon = time.monotonic() + self._rank_timeout
            for rank, due in call.due.items():
                if self._members[rank].block == member.block:
                    call.due[rank] = min(due, soon)
        elif member.speaks:
            call.scores[member.block] = _unpack_scores(body)

    def _on_lost(self, member: Member, reason: str) -> None:
        with self._changed:
            self._lose(f"{member} {reason}")

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
        for link in self._links:
            link.expect_end()
            link.send(rank_links.STOP)
        deadline = time.monotonic() + self._rank_timeout
        for link in self._links:
            if not link.wait_closed(max(0.0, deadline - time.monotonic())):
                logger.warning("event=rank_does_not_end rank=%s", link.peer)
            link.close()
        self._worker.join(max(0.0, deadline - time.monotonic()))


def follow(
    me: Member,
    connection: socket.socket,
    leader: Member,
    load: Callable[[], BlockModel],
    *,
    rank_timeout: float = 60.0,
    end: Callable[[str], object] | None = None,
) -> None:
    """Compute for rank 0 until it says stop.

    Args:
        me: this rank.
        connection: to rank 0.
        leader: rank 0.
        load: makes this rank's part of the model.
        rank_timeout: seconds of silence after which rank 0 counts as lost.
        end: ends the process when rank 0 is lost, on a thread that is not this one.
    """
    inbox: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    link = Link(
        connection,
        leader,
        rank_timeout,
        lambda kind, body: inbox.put((kind, body)),
        lambda reason: (end or end_process)(f"{leader} {reason}; {me} ends"),
    )
    link.start()
    model = load()
    link.send(rank_links.READY)
    while True:
        kind, body = inbox.get()
        if kind == rank_links.STOP:
            link.close()
            return
        if kind == rank_links.SCORE:
            number = _NUMBER.unpack_from(body)[0]
            micro_batches = unpack(np.frombuffer(body, np.int64, offset=_NUMBER.size).copy())  # torch wants to own it
            link.send(*_score(model, number, micro_batches, me))


def lead_ranks(
    mesh: Mesh, load: Callable[[], BlockModel], *, rank_timeout: float, call_timeout: float
) -> DistributedScorer:
    """On rank 0 of a job of several: meet the others, which call `follow_rank_0`. A collective call."""
    _remove_folder_of_torchrun()
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    listener = Listener("127.0.0.1" if one_node else os.environ["MASTER_ADDR"])
    me = _member_of(mesh)
    try:
        mesh.from_main((listener.address, me))
        connections = listener.accept(mesh.world_size - 1, CONNECT_SECONDS)
    finally:
        listener.close()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Else the server would go on as an orphan, with nobody to stop it, when torchrun is killed.
        die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        return DistributedScorer(me, connections, load, rank_timeout=rank_timeout, call_timeout=call_timeout)
    except RankLostError as error:
        end_process(str(error))


def follow_rank_0(mesh: Mesh, load: Callable[[], BlockModel], *, rank_timeout: float) -> None:
    """On every other rank: compute until rank 0 says stop; the process ends where rank 0 is gone. A collective call.

    SIGTERM and SIGINT are ignored: torchrun and terminals send them to every rank, and rank 0 needs the others until
    the last call is answered.
    """
    _remove_folder_of_torchrun()
    address, leader = mesh.from_main(None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    me = _member_of(mesh)
    follow(me, connect(address, me, CONNECT_SECONDS), leader, load, rank_timeout=rank_timeout)


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
    return Member.here(mesh.rank, mesh.dp_rank, mesh.is_last_stage and mesh.tp_rank == 0)


def _score(model: BlockModel, number: int, micro_batches: Sequence[MicroBatch], me: Member) -> tuple[int, bytes]:
    """This rank's part of a call, as the kind and the body of a message."""
    try:
        scores = np.asarray(model.score_micro_batches(micro_batches), np.float64)
    except Exception as error:
        logger.exception("event=rank_failed rank=%s", me)
        return rank_links.FAILED, _NUMBER.pack(number) + f"{type(error).__name__}: {error}".encode()
    return rank_links.SCORES, _NUMBER.pack(number) + _pack_scores(scores if me.speaks else np.zeros(0))


def _pack_scores(scores: np.ndarray) -> bytes:
    shape = np.array([scores.ndim, *scores.shape], np.int64)
    return shape.tobytes() + np.ascontiguousarray(scores).tobytes()


def _unpack_scores(body: bytes) -> np.ndarray:
    ndim = int(np.frombuffer(body, np.int64, 1)[0])
    shape = np.frombuffer(body, np.int64, ndim, offset=8)
    return np.frombuffer(body, np.float64, offset=8 * (1 + ndim)).reshape(shape)
