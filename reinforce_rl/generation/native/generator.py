"""The native engine: decode on the megatron actor with a KV cache, for any parallel layout.

All samples of a prompt share its keys and values. Finished samples leave the batch at once, and
waiting ones take their place. The engine reads the actor's weights, so there is nothing to refit.

Notation: N responses of the call, R rows of a step, h hidden.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, cuda

from reinforce_rl.data.batches import Completions, Prompt, join_completions
from reinforce_rl.data.tokenizer import pad_id_of
from reinforce_rl.generation.base import (
    PartialResponse,
    Partner,
    SamplingParams,
    WeightUpdates,
    check_lengths,
)
from reinforce_rl.generation.native.conversation import ConversingDecoding, Exchange
from reinforce_rl.generation.native.decoding import Decoding, PlainDecoding, Responses, Watch
from reinforce_rl.generation.responses import converse_in_rounds, new_responses
from reinforce_rl.megatron.model.attention import flash_takes
from reinforce_rl.megatron.model.decoding import FlashCache
from reinforce_rl.megatron.model.model import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_STEPS = 8  # between two checks for finished rows
_SMALL = (1, 2, 4, 8, 16)  # supported row counts; above them multiples of the next constant
_MULTIPLE = 32


class NativeGenerator:
    """A `Generator` on the actor's own weights.

    Args:
        max_tokens: bound on each rank's KV cache; None for all sequences of a call.
        is_lean: decode within `CausalLM.fast_decoding`; False for megatron's layers.
        is_static: use `StaticDecoding` if also `is_lean`, on a GPU in bf16.
        use_graphs: replay the steps of `StaticDecoding` as CUDA graphs.
    """

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None = None,
        *,
        is_lean: bool = True,
        is_static: bool = True,
        use_graphs: bool = True,
    ):
        self._lm = lm
        self._max_tokens = max_tokens
        self._is_lean = is_lean
        self._is_static = is_lean and is_static
        self._use_graphs = use_graphs
        self._tokenizer = tokenizer

    @property
    def is_exact(self) -> bool:
        """False in bf16, where incremental decoding rounds differently from a full pass."""
        return self._lm.config.params_dtype != torch.bfloat16

    def awake(self) -> AbstractContextManager[None]:
        """Do nothing: each call frees its cache."""
        return contextlib.nullcontext()

    def refit(self) -> None:
        """Do nothing: the engine decodes with the weights in training."""

    def close(self) -> None:
        """Do nothing: there is no engine process."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        params: SamplingParams,
        seed: int,
        watch: Watch | None = None,
    ) -> Completions:
        """See `Generator.generate`; the result is on the CPU.

        `watch`, see `Decoding`, costs time. Context-parallel ranks split the prompts; keyed noise
        keeps the results the same.
        """
        mesh = self._lm.mesh
        self._check((len(prompt.tokens), params.max_length) for prompt in prompts)
        begun = new_responses(self._share(prompts), num_samples, seed)
        completions = self._decode(begun, params, watch).finish() if begun else None
        if mesh.cp_size == 1 and completions is not None:
            return completions
        parts = [part for part in mesh.gather_over_cp(completions) if part is not None]
        return join_completions(parts, pad_id_of(self._tokenizer))

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        """See `Generator.resume`.

        At "load" the prompts are read again; keys and values of response tokens are kept.
        Context-parallel ranks split the responses, so there `updates` must not communicate.
        """
        mesh = self._lm.mesh
        self._check(
            (len(response.prompt.tokens), response.max_length(params)) for response in responses
        )
        results = list(responses)
        rows = [row for row, response in enumerate(responses) if response.finish_reason is None]
        # The sort is stable: responses with tokens come first, then prompt by prompt.
        rows.sort(key=lambda row: not responses[row].tokens)
        version = updates.version
        begun = [responses[row] for row in self._share(rows)]
        made: list[PartialResponse] = []
        if begun:
            made = self._decode(begun, params, None, updates).collect_responses(version)
        if mesh.cp_size > 1:
            made = [response for part in mesh.gather_over_cp(made) for response in part]
        for row, response in zip(rows, made, strict=True):
            results[row] = response
        return results

    def converse(
        self, responses: Sequence[PartialResponse], params: SamplingParams, partner: Partner
    ) -> None:
        """See `ConversingGenerator.converse`.

        Rows keep their keys and values between their turns. On a GPU in bf16, where
        `StaticDecoding` is faster, the rows are played in rounds.
        """
        if not responses:
            return
        longest = max(len(row.prompt.tokens) + row.room(params) for row in responses)
        if self._decodes_statically(longest):
            converse_in_rounds(self, responses, params, partner)
            return
        self._check((len(row.prompt.tokens), row.room(params)) for row in responses)
        rows = self._share(range(len(responses)))
        exchange = Exchange(partner, self._lm.mesh, len(responses), rows)
        if not rows:
            exchange.follow()
            return
        begun = [responses[row] for row in rows]
        with self._decoding_weights() as renew:
            call = (self._lm, self._tokenizer, self._max_tokens, begun, params, None, None, renew)
            ConversingDecoding(*call).converse(exchange)

    def _share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this context-parallel rank's share."""
        mesh = self._lm.mesh
        per_rank = -(-len(items) // mesh.cp_size)
        return items[mesh.cp_rank * per_rank : (mesh.cp_rank + 1) * per_rank]

    def _check(self, lengths: Iterable[tuple[int, int]]) -> None:
        limit = self._lm.architecture.max_positions
        check_lengths(lengths, limit, f"the model's {limit} positions")

    def _decode(
        self,
        begun: Sequence[PartialResponse],
        params: SamplingParams,
        watch: Watch | None,
        updates: WeightUpdates | None = None,
    ) -> Responses:
        with self._decoding_weights() as renew:
            call = (
                self._lm,
                self._tokenizer,
                self._max_tokens,
                begun,
                params,
                watch,
                updates,
                renew,
            )
            longest = max(len(response.prompt.tokens) for response in begun) + params.max_length
            if self._decodes_statically(longest):
                return StaticDecoding(*call, use_graphs=self._use_graphs).run()
            return PlainDecoding(*call).run()

    def _decodes_statically(self, longest: int) -> bool:
        return self._is_static and can_decode_statically(self._lm, longest)

    @contextlib.contextmanager
    def _decoding_weights(self) -> Iterator[Callable[[], None]]:
        """Prepare the model for decoding, without gradient; yields `Decoding`'s `renew`."""
        was_training = self._lm.training
        self._lm.eval()
        try:
            with torch.no_grad(), self._lm.whole_sequences(), contextlib.ExitStack() as lean:

                def renew() -> None:
                    lean.close()
                    if self._is_lean:
                        # On a CPU this copies the weights.
                        lean.enter_context(self._lm.fast_decoding())

                renew()
                yield renew
        finally:
            self._lm.train(was_training)


def can_decode_statically(lm: CausalLM, longest: int) -> bool:
    """Return True if flash attention can decode here; `longest`: tokens of the longest sequence."""
    shape = lm.architecture
    # The queries of a prompt share one call, but a sliding window differs for each query.
    in_window = shape.window is None or longest <= shape.window
    return in_window and flash_takes(lm.mesh.device, lm.config.params_dtype, shape.head_size)


def padded_rows(rows: int) -> int:
    """Round a number of sequences up to a supported number of rows."""
    return (
        -(-rows // _MULTIPLE) * _MULTIPLE
        if rows > _SMALL[-1]
        else _SMALL[bisect.bisect_left(_SMALL, rows)]
    )


class StaticDecoding(Decoding):
    """Decoder with static shapes, without host synchronisation at each step.

    Row state is on the device. The host checks for finished rows every `_STEPS` steps; until then
    they keep drawing into a spare row. The number of rows is padded to one of a few sizes, so a few
    CUDA graphs suffice. In a pipeline the rows are split into one group per stage, and the stages
    work on different groups at the same time.

    Args:
        call: arguments of `Decoding`.
        use_graphs: replay steps as CUDA graphs; ignored in a pipeline.
    """

    has_spare = True

    def __init__(self, *call: Any, use_graphs: bool = False):
        super().__init__(*call)
        self._cache = self._lm.new_cache(*self._sizes, kind=FlashCache)
        slots, _, rows, _ = self._sizes
        stages = self._lm.mesh.pp_size
        # Finished rows and the padding of a group write there.
        self._padding_row = len(self._keys)
        self._keys = torch.cat((self._keys, self._keys[:1]))
        self._limits = torch.cat((self._limits, self._limits[:1]))
        self._alive = torch.ones(self._padding_row + 1, dtype=torch.bool, device=self._device)
        self._alive[self._padding_row] = False
        size = padded_rows(-(-rows // stages))
        most = max(self._most_samples, _MULTIPLE)
        self._groups = [_MicroGroup(size, slots, most, self._device) for _ in range(stages)]
        self._most_rows = max(size, rows)
        self._free = list(range(rows))
        self._lane_of = dict[int, int]()
        self._freed = False
        self._use_graphs = use_graphs and stages == 1

    def run(self) -> Responses:
        # A local: in `self`, a reference cycle would keep the cache until garbage collection.
        step = GraphedStep(self._whole_step) if self._use_graphs else self._whole_step
        while (steps := self._admit()) is not None:
            if len(self._groups) > 1:
                self._rotate(steps)
            else:
                for _ in range(steps):
                    step(self._groups[0].rows)
            self._look(steps)
            if self._watch is not None:
                self._watch(self._responses.so_far())
            if self._is_stopped():
                break
        return self._responses

    def _admit(self) -> int | None:
        """Fill free rows with waiting samples.

        Returns the number of steps to run, None at the end.
        """
        schedule = self._schedule
        before = len(schedule.running)
        unread = schedule.admit()
        if unread:
            self._read_prompts(unread)
        new = schedule.running[before:]
        if new:
            samples = self._on_device([sequence.sample for sequence in new])
            self._draw(
                self._of_prompts[[sequence.slot for sequence in new]],
                samples,
                torch.zeros_like(samples),
            )
            for sequence in new:
                sequence.written = 1
                self._lane_of[sequence.sample] = self._free.pop()
        if not schedule.running:
            return None
        if new or self._freed:
            self._place()
        # Both need a check after each token.
        if self._params.end_strings or self._watch is not None:
            return 0 if new else 1
        return min(_STEPS, *(sequence.limit - sequence.written for sequence in schedule.running))

    def _read_prompts(self, numbers: Sequence[int]) -> None:
        lengths = [len(self._prompts[number]) for number in numbers]
        self._cache.read([self._schedule.slot_of[number] for number in numbers], lengths)
        self._prefill(numbers, self._cache)

    def _place(self) -> None:
        running = sorted(self._schedule.running, key=lambda sequence: sequence.slot)
        share = -(-len(running) // len(self._groups))
        for number, group in enumerate(self._groups):
            mine = running[number * share : (number + 1) * share]
            starts = [self._cache.lane_start(self._lane_of[sequence.sample]) for sequence in mine]
            lengths = [len(self._prompts[sequence.prompt]) for sequence in mine]
            rows = [
                (sequence.sample, n, sequence.written, at)
                for sequence, n, at in zip(mine, lengths, starts, strict=True)
            ]
            unused = padded_rows(share) - len(mine)
            group.place(
                rows + [(self._padding_row, 1, 1, self._cache.spare)] * unused,
                [sequence.slot for sequence in mine],
            )

    def _whole_step(self, rows: int) -> None:
        self._write(self._groups[0], self._read(self._groups[0]))

    def _rotate(self, steps: int) -> None:
        """Run `steps` steps of every group.

        At tick t, stage s works on group (t - s) modulo the number of stages.
        """
        mesh = self._lm.mesh
        stages = len(self._groups)
        total = steps * stages
        received = None
        for tick in range(total + stages - 1 if steps else 0):
            number = tick - mesh.pp_rank
            hidden = None
            if 0 <= number < total:
                if received is not None:
                    self._lm.set_input_tensor(received)
                hidden = self._read(self._groups[number % stages])
            comes = mesh.pp_rank > 0 and 0 <= number + 1 < total
            received = self._hand_on(
                None if mesh.is_last_stage else hidden, self._groups[0].rows if comes else 0
            )
            if tick >= stages - 1:
                self._write(self._groups[(tick - stages + 1) % stages], hidden)

    def _read(self, group: _MicroGroup) -> Tensor:
        samples, lengths, written, starts = group.numbers
        self._cache.at(starts, written - 1, group.rows_of_slots, group.most_rows)
        tokens = self._responses.last_tokens(samples, written)
        return self._lm(tokens[:, None], (lengths + written - 1)[:, None], self._cache)

    def _write(self, group: _MicroGroup, hidden: Tensor | None) -> None:
        """Draw the next tokens; `hidden` is [R, 1, h] on the last stage."""
        samples, _, written, _ = group.numbers
        self._draw(hidden[:, 0] if hidden is not None else None, samples, written)
        written.add_(self._alive[samples])

    def _draw(self, hidden: Tensor | None, samples: Tensor, written: Tensor) -> None:
        """Write the next token of each unfinished row."""
        tokens, log_probs = self._next_tokens(hidden, samples, written)
        alive = self._alive[samples]
        at = samples.where(alive, self._padding_row)
        stopped = self._responses.record(at, written, tokens, log_probs)
        # One limit for all rows, the usual case, saves a kernel.
        limits = self._limits[samples] if self._is_mixed else self._sizes[-1]
        self._alive[at] = alive & ~stopped & (written + 1 < limits)

    def _on_device(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers).to(self._device, non_blocking=True)

    def _look(self, steps: int) -> None:
        """Sync with the device and remove finished rows."""
        running = self._schedule.running
        if self._params.end_strings:
            samples = self._on_device([sequence.sample for sequence in running])
            self._alive[samples] &= ~self._responses.stop_at_end_strings(samples)
        alive = (
            self._alive.tolist()
            if self._params.end_strings or self._params.stop_token_ids
            else None
        )
        ended = [
            row
            for row, sequence in enumerate(running)
            if alive is not None and not alive[sequence.sample]
        ]
        self._freed = self._schedule.advance(ended, steps) is not None
        if self._freed:
            left = {sequence.sample for sequence in self._schedule.running}
            for sample in [sample for sample in self._lane_of if sample not in left]:
                self._free.append(self._lane_of.pop(sample))


class _MicroGroup:
    """Rows that pass through the stages together; their device buffers have fixed addresses."""

    def __init__(self, size: int, slots: int, most_rows: int, device: torch.device):
        self.rows = 0
        self._slots = slots
        self._most_rows = most_rows
        self._numbers = torch.zeros((4, size), dtype=torch.long, device=device)
        self.rows_of_slots = torch.zeros(slots + 2, dtype=torch.int32, device=device)

    def place(self, rows: Sequence[tuple[int, int, int, int]], slots: Sequence[int]) -> None:
        """Set the rows, sorted by slot, with values as in `numbers`; rows beyond `slots` pad."""
        self.rows = len(rows)
        self.most_rows = min(len(rows), self._most_rows)
        self._numbers[:, : self.rows].copy_(torch.tensor(rows).t(), non_blocking=True)
        counts = Counter(slots)
        firsts = np.cumsum(
            [0, *(counts[slot] for slot in range(self._slots)), len(rows) - len(slots)]
        )
        self.rows_of_slots.copy_(torch.from_numpy(firsts), non_blocking=True)

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return int64 [R] each: samples, prompt tokens, response tokens, lane starts."""
        samples, lengths, written, starts = self._numbers[:, : self.rows]
        return samples, lengths, written, starts


class GraphedStep:
    """Capture a step, which takes the number of rows, once per number of rows; then replay it.

    The step must update preallocated tensors in place and branch on the host only by the number of
    rows. Graphs hold weight addresses, so weights must not move.
    """

    def __init__(self, step: Callable[[int], None]):
        self._step = step
        self._graphs: dict[int, cuda.CUDAGraph | None] = {}
        self._stream = cuda.Stream()
        self._pool = cuda.graph_pool_handle()  # shared, since graphs never run concurrently

    def __call__(self, rows: int) -> None:
        if rows not in self._graphs:
            # Warm up on the capture stream: a library's first call allocates a workspace, which is
            # illegal in a capture.
            self._graphs[rows] = None
            self._stream.wait_stream(cuda.current_stream())
            with cuda.stream(self._stream):
                self._step(rows)
            cuda.current_stream().wait_stream(self._stream)
            return
        graph = self._graphs[rows]
        if graph is None:
            graph = cuda.CUDAGraph()
            self._graphs[rows] = graph
            # thread_local: NCCL's watchdog thread calls CUDA during the capture.
            with cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._step(rows)
        graph.replay()
