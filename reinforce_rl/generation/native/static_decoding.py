"""Decoding on a GPU with static shapes and without host synchronisation at each step.

Row state is on the device. The host checks for finished rows every `_STEPS` steps; until then they keep drawing into a
spare row. The number of rows is padded to one of a few sizes, so that few CUDA graphs suffice.

In a pipeline the rows are split into one lot per stage, and the stages work on different lots at the same time.

Notation: N responses of the call, R rows of a step, T maximum response tokens, h hidden.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.generation.native.cuda_graphs import GraphedStep
from reinforce_rl.generation.native.decoding import Decoding
from reinforce_rl.generation.native.schedule import Running
from reinforce_rl.megatron.model.attention import flash_takes
from reinforce_rl.megatron.model.decoding import FlashCache
from reinforce_rl.megatron.model.model import CausalLM

_STEPS = 8
_SMALL = (1, 2, 4, 8, 16)  # supported row counts; above them multiples of the next constant
_MULTIPLE = 32


def can_decode_statically(lm: CausalLM, longest: int) -> bool:
    """Return True if flash attention can decode here; `longest` is the length of the longest sequence in tokens."""
    shape = lm.architecture
    # The queries of a prompt share one call, but a sliding window differs for each query.
    in_window = shape.window is None or longest <= shape.window
    return in_window and flash_takes(lm.mesh.device, lm.config.params_dtype, shape.head_size)


def padded_rows(rows: int) -> int:
    """Round a number of sequences up to a supported number of rows."""
    return -(-rows // _MULTIPLE) * _MULTIPLE if rows > _SMALL[-1] else _SMALL[bisect.bisect_left(_SMALL, rows)]


class StaticDecoding(Decoding):
    """Decoder with static shapes; see the module.

    Args:
        call: arguments of `Decoding`; the responses need a spare row.
        use_graphs: replay steps as CUDA graphs; ignored in a pipeline.
    """

    def __init__(self, lm: CausalLM, *call: Any, use_graphs: bool = False):
        super().__init__(lm, *call)
        self._cache = lm.new_cache(*self._sizes, kind=FlashCache)
        slots, _, rows, _ = self._sizes
        self._nobody, stages = len(self._keys), lm.mesh.pp_size
        self._keys = torch.cat((self._keys, self._keys[:1]))
        self._alive = torch.ones(self._nobody + 1, dtype=torch.bool, device=self._device)
        self._alive[self._nobody] = False
        size, most = padded_rows(-(-rows // stages)), max(self._nobody // len(self._prompts), _MULTIPLE)
        self._lots = [_Lot(size, slots, most, self._device) for _ in range(stages)]
        self._most_rows = max(size, rows)
        self._free, self._lane_of, self._freed = list(range(rows)), dict[int, int](), False
        self._use_graphs = use_graphs and stages == 1

    def run(self) -> None:
        # Not in `self`: a reference cycle would keep the cache until garbage collection.
        step = GraphedStep(self._whole_step) if self._use_graphs else self._whole_step
        while (steps := self._admit()) is not None:
            if len(self._lots) > 1:
                self._rotate(steps)
            else:
                for _ in range(steps):
                    step(self._lots[0].rows)
            self._look(steps)

    def _admit(self) -> int | None:
        """Fill free rows with waiting samples; return the number of steps to run, None at the end."""
        schedule, before = self._schedule, len(self._schedule.running)
        unread = schedule.admit()
        if unread:
            lengths = [len(self._prompts[number]) for number in unread]
            self._cache.read([schedule.slot_of(number) for number in unread], lengths)
            self._prefill(unread, self._cache)
        new = schedule.running[before:]
        if new:
            samples = self._on_device([one.sample for one in new])
            self._draw(self._of_prompts[[one.slot for one in new]], samples, torch.zeros_like(samples))
            for one in new:
                one.written, self._lane_of[one.sample] = 1, self._free.pop()
        if not schedule.running:
            return None
        if new or self._freed:
            self._place()
        if self._params.end_strings:  # checked after each token
            return 0 if new else 1
        return min(_STEPS, self._params.max_length - schedule.longest)

    def _place(self) -> None:
        running = sorted(self._schedule.running, key=lambda one: one.slot)
        share = -(-len(running) // len(self._lots))
        for number, lot in enumerate(self._lots):
            mine = running[number * share : (number + 1) * share]
            lot.place(
                mine,
                [len(self._prompts[one.prompt]) for one in mine],
                [self._cache.lane_start(self._lane_of[one.sample]) for one in mine],
                padded_rows(share),
                (self._nobody, 1, 1, self._cache.spare),
            )

    def _whole_step(self, rows: int) -> None:
        hidden = self._read(self._lots[0])
        self._write(self._lots[0], hidden)

    def _rotate(self, steps: int) -> None:
        """Run `steps` steps of every lot: at tick t, stage s works on lot (t - s) modulo the stages."""
        mesh, stages = self._lm.mesh, len(self._lots)
        total, given = steps * stages, None
        for tick in range(total + stages - 1 if steps else 0):
            number, hidden = tick - mesh.pp_rank, None
            if 0 <= number < total:
                if given is not None:
                    self._lm.set_input_tensor(given)
                hidden = self._read(self._lots[number % stages])
            comes = mesh.pp_rank > 0 and 0 <= number + 1 < total
            given = self._hand_on(None if mesh.is_last_stage else hidden, self._lots[0].rows if comes else 0)
            if tick >= stages - 1:
                self._write(self._lots[(tick - stages + 1) % stages], hidden)

    def _read(self, lot: _Lot) -> Tensor:
        samples, lengths, written, starts = lot.numbers
        self._cache.at(starts, written - 1, lot.rows_of_slots, lot.most_rows)
        tokens = self._responses.last_tokens(samples, written)
        return self._lm(tokens[:, None], (lengths + written - 1)[:, None], self._cache)

    def _write(self, lot: _Lot, hidden: Tensor | None) -> None:
        """Draw the next tokens; `hidden` is [R, 1, h] on the last stage."""
        samples, _, written, _ = lot.numbers
        self._draw(hidden[:, 0] if hidden is not None else None, samples, written)
        written.add_(self._alive[samples])

    def _draw(self, hidden: Tensor | None, samples: Tensor, written: Tensor) -> None:
        """Write the next token of each unfinished row."""
        tokens, log_probs = self._next_tokens(hidden, samples, written)
        alive = self._alive[samples]
        at = samples.where(alive, self._nobody)
        stopped = self._responses.record(at, written, tokens, log_probs)
        self._alive[at] = alive & ~stopped & (written + 1 < self._params.max_length)

    def _on_device(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers).to(self._device, non_blocking=True)

    def _look(self, steps: int) -> None:
        """Sync with the device and remove finished rows."""
        running = self._schedule.running
        if self._params.end_strings:
            samples = self._on_device([one.sample for one in running])
            self._alive[samples] &= ~self._responses.stop_at_end_strings(samples)
        alive = self._alive.tolist() if self._params.end_strings or self._params.stop_token_ids else None
        ended = [row for row, one in enumerate(running) if alive is not None and not alive[one.sample]]
        self._freed = self._schedule.advance(ended, steps) is not None
        if self._freed:
            left = {one.sample for one in self._schedule.running}
            for sample in [sample for sample in self._lane_of if sample not in left]:
                self._free.append(self._lane_of.pop(sample))


class _Lot:
    """Rows that pass through the stages together; device state in buffers with fixed addresses."""

    def __init__(self, size: int, slots: int, most_rows: int, device: torch.device):
        self.size, self.rows, self._slots, self._most_rows = size, 0, slots, most_rows
        self._numbers = torch.zeros((4, size), dtype=torch.long, device=device)
        self.rows_of_slots = torch.zeros(slots + 2, dtype=torch.int32, device=device)

    def place(
        self,
        running: Sequence[Running],
        lengths: Sequence[int],
        starts: Sequence[int],
        rows: int,
        nobody: tuple[int, int, int, int],
    ) -> None:
        """Set the rows, sorted by slot, and pad them to `rows` with the numbers of `nobody`.

        `lengths` are prompt tokens and `starts` the lane starts of each row.
        """
        self.rows, self.most_rows = rows, min(rows, self._most_rows)
        numbers = [
            (one.sample, length, one.written, start)
            for one, length, start in zip(running, lengths, starts, strict=True)
        ]
        numbers += [nobody] * (rows - len(running))
        self._numbers[:, :rows].copy_(torch.tensor(numbers).t(), non_blocking=True)
        counts = Counter(one.slot for one in running)
        firsts = np.cumsum([0, *(counts[slot] for slot in range(self._slots)), rows - len(running)])
        self.rows_of_slots.copy_(torch.from_numpy(firsts), non_blocking=True)

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return int64 [R] each: samples, prompt tokens, response tokens, lane starts."""
        samples, lengths, written, starts = self._numbers[:, : self.rows]
        return samples, lengths, written, starts
