"""A weight group whose members change: each epoch is a process group, which ends at a loss."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from reinforce_rl.utils.net import interface_of

_POLL_SECONDS = 0.02
_POLL_GPU_SECONDS = 0.001
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class ElasticWeightGroup:
    """The first trainer, which sends weights, and the generators' ranks of an epoch.

    On a generator an error is a RuntimeError. On the trainer, whose other ranks take part in what
    it sends, it becomes `fault`, and nothing more is sent: gloo raises at once where a peer is
    gone, and after `timeout` where one hangs. NCCL does neither, so its transfers are
    polled and aborted.

    Args:
        store: torch's, shared by all that may ever be in the group.
        host: address of this rank, as the others reach it.
    """

    def __init__(self, store: Any, host: str, device: torch.device, timeout: timedelta):
        self._store = store
        self._host = host
        self._device = device
        self._timeout = timeout
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._backend: Any = None
        self._sends = False
        self.epoch = 0
        self.fault = "it was not formed"

    def form(
        self, epoch: int, rank: int, size: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Meet the epoch's other ranks; the first one gives it up once `is_wanted` is false.

        Raises:
            RuntimeError: it was given up, a rank did not come within the timeout, or no interface
                of this machine has the address `host`.
        """
        self.close()
        store = PrefixStore(f"weights {epoch}", self._store)
        self._sends = rank == 0
        # Before the backends meet, which cannot be interrupted: they would wait for a dead rank.
        if rank == 0:
            _gather(store, size, is_wanted, time.monotonic() + self._timeout.total_seconds())
        else:
            store.set(f"{rank}", "here")
            store.wait(["all"], self._timeout)
            if store.get("all") != b"here":
                raise RuntimeError("the trainers gave up the group because a member was lost")
        if self._device.type == "cuda":
            # By default the loss of a peer ends this process too; NCCL reads this as a group is
            # made.
            with _environment_variable(_NCCL_ERRORS, "0"):
                nccl: Any = dist.ProcessGroupNCCL
                self._backend = nccl(store, rank, size, self._timeout)
        else:
            try:
                interface = interface_of(self._host)
            except OSError as error:
                raise RuntimeError(str(error)) from error
            # Otherwise gloo listens at the address of the machine's name.
            with _environment_variable(_GLOO_INTERFACE, interface):
                self._backend = dist.ProcessGroupGloo(store, rank, size, self._timeout)
        self.epoch = epoch
        self.fault = ""

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Send a contiguous tensor from the first rank, or receive into it.

        `wait` for the result.
        """
        return _Transfer(
            self, self._attempt(lambda: self._backend.broadcast([tensor], self._options))
        )

    def wait_for(self, work: Any) -> None:
        """Wait for a transfer of the backend, as long as this epoch has no fault."""
        self._attempt(lambda: self._poll(work) if self._device.type == "cuda" else work.wait())

    def abandon(self, epoch: int, why: str) -> None:
        """Let no transfer of this epoch go on; from any thread.

        A transfer of gloo ends by itself.
        """
        if epoch == self.epoch:
            self.fault = self.fault or why

    def close(self) -> None:
        """Leave the epoch; the others' transfers fail."""
        backend = self._backend
        self._backend = None
        self.fault = self.fault or "it is closed"
        if backend is not None and self._device.type == "cuda":
            backend.abort()

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            if self.fault:
                raise RuntimeError(self.fault)
            return action()
        except RuntimeError as error:
            self.fault = self.fault or str(error).partition("\n")[0]
            if not self._sends:
                raise
            return None

    def _poll(self, work: Any) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if self.fault or time.monotonic() > deadline:
                self._backend.abort()
                raise RuntimeError(
                    self.fault or f"NCCL did not end within {self._timeout.total_seconds():.0f} s"
                )
            time.sleep(_POLL_GPU_SECONDS)


@dataclass(frozen=True)
class _Transfer:
    group: ElasticWeightGroup
    work: Any  # the backend's; None after a fault

    def wait(self) -> None:
        if self.work is not None:
            self.group.wait_for(self.work)


def _gather(store: Any, size: int, is_wanted: Callable[[], bool], deadline: float) -> None:
    others = [f"{rank}" for rank in range(1, size)]
    while not store.check(others):
        if not is_wanted() or time.monotonic() > deadline:
            store.set("all", "given up")
            raise RuntimeError("a member did not join the group")
        time.sleep(_POLL_SECONDS)
    store.set("all", "here")


@contextlib.contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
