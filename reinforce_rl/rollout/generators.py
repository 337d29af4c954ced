"""Remote generators, as every trainer sees them: requests, their results, new weights."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import ReinforceError, StoppedEarly
from reinforce_rl.megatron.torch_archive import check_torch_archive
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rollout.generator_pool import GeneratorPool, is_sound
from reinforce_rl.rollout.messages import GenerationRequest, GenerationResult
from reinforce_rl.rollout.source import BatchIterator, RolloutHandle
from reinforce_rl.rollout.weights import send_weights
from reinforce_rl.runtime.stop import StopRequest

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

T = TypeVar("T")
# Tensors of `Completions`.
_TENSORS = (
    "tokens",
    "lengths",
    "log_probs",
    "weight_versions",
    "policy_mask",
    "history_mask",
    "turn_rewards",
    "environment_rewards",
)


class Generators:
    """What every trainer knows of the generators. All trainers call its methods together.

    Args:
        pool: on rank 0, else None.
        make_micro_batches: called with (prompts, validation); yields prompts to generate together.
        takes_finished: see rollout_order.
    """

    def __init__(
        self,
        model: MegatronGPTReinforceActorModel,
        pool: GeneratorPool | None,
        make_micro_batches: BatchIterator,
        stop: StopRequest,
        takes_finished: bool = False,
    ):
        self.takes_finished = takes_finished
        self._model = model
        self._pool = pool
        self._make_micro_batches = make_micro_batches
        self._stop = stop
        self._numbers = count()
        # by prompt, rollouts of a checkpoint that may be trained on
        self._stored: dict[int, dict[str, Any]] = {}
        self.version = 0  # of the newest weights that the generators were sent
        self._oldest = 0  # that they may still be asked for

    @property
    def _mesh(self) -> Mesh:
        return self._model.mesh

    def submit(
        self, prompts: Sequence[Prompt], num_samples: int, seed: int, step: int, version: int
    ) -> RolloutHandle:
        """Queue this rank's share of the prompts of a step, behind all submitted before.

        Step 0 is a validation.
        """
        allow_newer = self.takes_finished and step > 0
        parts: list[tuple[Prompt, ...]]
        if allow_newer:
            parts = [(prompt,) for prompt in prompts]
        else:
            parts = [tuple(part) for part in self._make_micro_batches(prompts, step == 0)]
        shares = self._mesh.gather_over_dp(parts)
        version = self._oldest if allow_newer else max(version, self._oldest)
        numbered = [[(next(self._numbers), part) for part in share] for share in shares]
        # Ends of shares may be smaller; taking them last shortens the final wait.
        order = sorted(
            (i, owner) for owner, share in enumerate(numbered) for i in range(len(share))
        )
        if self._pool is not None:
            ordered = (numbered[owner][i] for i, owner in order)
            self._give(
                [
                    GenerationRequest(n, step, version, part, num_samples, seed, allow_newer)
                    for n, part in ordered
                ],
                self._pool,
            )
        return RolloutHandle([[number for number, _ in share] for share in numbered], version)

    def _give(self, requests: Sequence[GenerationRequest], pool: GeneratorPool) -> None:
        new = []
        for request in requests:
            stored = self._stored.pop(request.prompts[0].id, None) if request.allow_newer else None
            if stored is None:
                new.append(request)
            else:
                pool.readmit(request, _unpacked(request.prompts[0].id, stored, request.number))
        pool.submit(new)

    def collect(self, handle: RolloutHandle, prompts: Sequence[Prompt]) -> list[GenerationResult]:
        """Wait for the requests of a handle; return the results of `prompts`, this rank's share.

        Raises:
            StoppedEarly: some rank was asked to stop; on all ranks.
            ReinforceError, ConnectionError: see `GeneratorPool.await_results`.
        """
        # A resumed run has stored rollouts: later ones may need the weights that this step trains
        # away.
        self._await([handle], self._stop, anybody=handle.stored is not None)
        if handle.stored is not None:
            return [_unpacked(prompt.id, handle.stored[prompt.id]) for prompt in prompts]
        results = None
        with self._mesh.raise_on_all_ranks():
            if self._pool is not None:
                results = self._pool.results(list(chain.from_iterable(handle.numbers)))
        by_number = {result.number: result for result in self._unless_stopped(results)}
        return [by_number[number] for number in handle.numbers[self._mesh.dp_rank]]

    def collect_first(
        self, numbers: Sequence[int], count: int, oldest: int
    ) -> tuple[list[GenerationResult], int]:
        """Wait for the first of this rank's requests to finish, this many.

        See `GeneratorPool.take`; raises as `collect`.

        Returns:
            This rank's results, in the order of their numbers, and how many were dropped on all
            ranks.
        """
        shares = self._mesh.gather_over_dp((list(numbers), count))
        self._send_until(lambda pool: not pool.await_first(shares, oldest, self._stop))
        taken = None
        with self._mesh.raise_on_all_ranks():
            if self._pool is not None:
                taken = self._pool.take(shares, oldest)
        results, dropped = self._unless_stopped(taken)
        share = set(numbers)
        return [result for result in results if result.number in share], dropped

    def _unless_stopped(self, answer: T | None) -> T:
        """Return the first rank's answer on all ranks; None there means that a stop came first."""
        answer = self._mesh.from_main(answer)
        if answer is None:
            who = self._stop.reason or "a signal to another rank"
            raise StoppedEarly(f"stopped by {who}", key="run.stop.by_signal")
        return answer

    def forget(self, handle: RolloutHandle) -> None:
        """Drop the results of a handle's requests; rank 0 knows all ranks'."""
        if self._pool is not None:
            self._pool.forget(chain.from_iterable(handle.numbers))

    def state(self, handles: Mapping[int, RolloutHandle]) -> bytes:
        """Return the rollouts of the handles, by step, for `restore`, after waiting for them.

        A collective call; ranks other than 0 return nothing. Rollouts of the newest weights are
        left out, as a resumed run makes the same ones. So are a step with a failure and all after
        it, and rollouts that no generator is there to make. With `takes_finished`, all requests
        that are finished are returned too, by prompt.
        """
        waited = [
            handle
            for handle in handles.values()
            if handle.stored is None and handle.version != self.version
        ]
        # An error that ends the run leaves out rollouts. After the loss of a rank of the job
        # nothing is saved: a resumed run starts from the checkpoint before, with the same rollouts.
        failure: Exception | None = None
        try:
            self._await(waited)
        except (ReinforceError, ConnectionError) as error:
            failure = error
        # Rank 0 decides: other ranks see errors of other types.
        if self._mesh.from_main(isinstance(failure, ConnectionError)):
            assert failure is not None
            raise failure
        pool = self._pool
        if pool is None:
            return b""
        steps = []
        for step, handle in handles.items():
            if handle.version == self.version:
                break
            stored = handle.stored
            if stored is None:
                try:
                    results = pool.results(list(chain.from_iterable(handle.numbers)))
                except ReinforceError:  # the one that ends the run, which is saved without these
                    break
                if results is None or not all(map(is_sound, results)):
                    break
                stored = _packed(results)
            steps.append({"step": step, "version": handle.version, "stored": stored})
        if self.takes_finished:
            finished = _packed(pool.finished())
            if finished:
                steps.append({"step": 0, "version": 0, "stored": finished})
        content = io.BytesIO()
        torch.save(steps, content)
        return content.getvalue() if steps else b""

    def restore(self, content: bytes) -> dict[int, RolloutHandle]:
        """Return the handles of a `state`, by step."""
        if content:
            check_torch_archive(io.BytesIO(content), 0, len(content))
        steps = torch.load(io.BytesIO(content), weights_only=True) if content else []
        self._stored = {
            prompt: packed
            for entry in steps
            if not entry["step"]
            for prompt, packed in entry["stored"].items()
        }
        return {
            entry["step"]: RolloutHandle([], entry["version"], entry["stored"])
            for entry in steps
            if entry["step"]
        }

    def publish(self, version: int, *, as_oldest: bool = False) -> None:
        """Send the policy's weights as this version.

        With `as_oldest` the generators are to have no earlier one.
        """
        self.version = version
        if as_oldest:
            self._oldest = version
        self._send()

    def _await(
        self,
        handles: Iterable[RolloutHandle],
        stop: StopRequest | None = None,
        anybody: bool = False,
    ) -> None:
        numbers = [number for handle in handles for number in chain.from_iterable(handle.numbers)]
        self._send_until(lambda pool: not pool.await_results(numbers, stop, anybody))

    def _send_until(self, is_over: Callable[[GeneratorPool], bool]) -> None:
        """Wait until `is_over`, and send weights to generators that lack them meanwhile."""
        while True:
            is_wanted = False
            with self._mesh.raise_on_all_ranks():
                if self._pool is not None:
                    is_wanted = not is_over(self._pool)
            if not self._mesh.from_main(is_wanted):
                return
            self._send()

    def _send(self) -> None:
        """Send the newest weights to all generators that lack them; a collective call."""
        while True:
            group = None
            with self._mesh.raise_on_all_ranks():
                if self._pool is not None:
                    group = self._pool.group_for(self.version)
            if not self._mesh.from_main(group is not None):
                return
            if self._mesh.dp_rank == 0:
                send_weights(self._model.lm, group)


def _packed(results: Iterable[GenerationResult]) -> dict[int, dict[str, Any]]:
    """Return the rollouts of each prompt, by its id, as plain values and tensors."""
    packed: dict[int, dict[str, Any]] = {}
    for result in results:
        packed |= _packed_result(result)
    return packed


def _packed_result(result: GenerationResult) -> dict[int, dict[str, Any]]:
    completions = result.completions
    rewards = result.rewards
    samples = len(completions.lengths) // len(result.prompt_ids)
    packed = {}
    for at, prompt in enumerate(result.prompt_ids):
        part = slice(at * samples, (at + 1) * samples)
        tensors = {name: getattr(completions, name) for name in _TENSORS}
        tensors = {
            name: None if value is None else value[part].clone() for name, value in tensors.items()
        }
        scores = None
        if rewards is not None:
            by_source = {name: values[part].clone() for name, values in rewards.by_source.items()}
            faults = {
                row - part.start: text
                for row, text in rewards.faults.items()
                if part.start <= row < part.stop
            }
            values = rewards.values[part].clone()
            status = rewards.status[part].clone()
            scores = {"values": values, "status": status, "by_source": by_source, "faults": faults}
        packed[prompt] = {
            **tensors,
            "finish_reasons": list(completions.finish_reasons[part]),
            "environment_faults": list(completions.environment_faults[part]),
            "scores": scores,
        }
    return packed


def _unpacked(prompt: int, stored: dict[str, Any], number: int = -1) -> GenerationResult:
    tensors = {name: stored[name] for name in _TENSORS}
    completions = Completions(
        **tensors,
        finish_reasons=tuple(stored["finish_reasons"]),
        environment_faults=tuple(stored["environment_faults"]),
    )
    rewards = None if stored["scores"] is None else Rewards(**stored["scores"])
    return GenerationResult(number, (prompt,), completions, rewards)
