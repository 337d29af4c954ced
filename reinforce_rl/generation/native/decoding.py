"""The decoder for any device, and the parts that it shares with a GPU's decoder.

The shared parts are response buffers, pipeline passes and sampling.

Notation: R rows of a step, b sequences per pass, s positions, h hidden, V vocabulary, N responses,
T maximum response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from reinforce_rl.data.batches import Completions
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.data.tokenizer import decode_all, pad_id_of
from reinforce_rl.generation.base import PartialResponse, SamplingParams, WeightUpdates
from reinforce_rl.generation.native.sampling import (
    Workspace,
    choose_tokens,
    penalise_repetition,
    position_keys,
    token_log_probs,
)
from reinforce_rl.generation.native.schedule import Running, Schedule
from reinforce_rl.megatron.model.model import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Watch = Callable[[list[list[int]]], None]


class Responses:
    """Buffers for the tokens that a call adds to responses, and history-dependent sampling rules.

    `spare` adds a scratch row.
    """

    def __init__(
        self,
        begun: Sequence[PartialResponse],
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        spare: bool,
    ):
        self._begun = list(begun)
        rows = len(begun) + spare
        before = [len(response.tokens) for response in begun]
        self._params = params
        self._tokenizer = tokenizer
        width = max(response.max_length(params) - len(response.tokens) for response in begun)
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        self._tokens = torch.full(
            (rows, width), pad_id_of(tokenizer), dtype=torch.long, device=device
        )
        self._log_probs = torch.zeros((rows, width), dtype=torch.float32, device=device)
        # Numbers of tokens of earlier calls. Usually all are 0, and None saves a kernel per step.
        self._before = torch.tensor([*before, *[0] * spare], device=device) if any(before) else None
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)  # of this call
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._marks: list[tuple[int, Tensor]] = []
        self._seen: Tensor | None = None

    def adjust(self, logits: Tensor, samples: Tensor, written: Tensor) -> Tensor:
        """Apply the repetition penalty and ban stop tokens before min_length: [R, V] to [R, V].

        `samples` int64 [R] is each row's response, `written` int64 [R] its number of tokens so far.
        """
        if self._params.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros(
                    (len(self._tokens), logits.shape[1]), dtype=torch.bool, device=logits.device
                )
                for row, response in enumerate(self._begun):
                    self._seen[row, torch.tensor([*response.prompt.tokens, *response.tokens])] = (
                        True
                    )
            logits = penalise_repetition(
                logits, self._seen[samples], self._params.repetition_penalty
            )
        if self._params.min_length and self._stops.numel():
            early = (self._since_begin(samples, written) < self._params.min_length)[:, None]
            banned = torch.where(early, float("-inf"), logits.index_select(1, self._stops))
            logits = logits.index_copy(1, self._stops, banned)
        return logits

    def _since_begin(self, samples: Tensor, written: Tensor) -> Tensor:
        return written if self._before is None else self._before[samples] + written

    def append(
        self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor
    ) -> list[int]:
        """Write one token per row, int64 [R]; return the rows that ended.

        A row ends by a stop token or an end string.
        """
        stopped = self.record(samples, written, tokens, log_probs)
        if not self._stops.numel() and not self._params.end_strings:
            return []  # skips a device sync
        if self._params.end_strings:
            stopped = stopped | self.stop_at_end_strings(samples)
        return stopped.nonzero()[:, 0].tolist()

    def record(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Write tokens without device sync and without end strings; see `append`.

        Returns bool [R], True where a response ended.
        """
        self._tokens[samples, written] = tokens
        self._log_probs[samples, written] = log_probs
        self._lengths[samples] = written + 1
        if self._seen is not None:
            # A tensor on the device: a CUDA graph forbids copying a Python scalar to the device.
            self._seen[samples, tokens] = torch.ones_like(tokens, dtype=torch.bool)
        stopped = (tokens[:, None] == self._stops).any(dim=1)
        self._stopped[samples] = stopped
        return stopped

    def stop_at_end_strings(self, samples: Tensor) -> Tensor:
        """Mark responses that contain an end string as stopped; return them as bool [R]."""
        lengths = self._lengths[samples]
        rows = zip(self._tokens[samples].tolist(), lengths.tolist(), strict=True)
        earlier = [
            self._begun[sample].tokens if sample < len(self._begun) else ()
            for sample in samples.tolist()
        ]
        whole = [[*old, *new[:length]] for old, (new, length) in zip(earlier, rows, strict=True)]
        texts = decode_all(self._tokenizer, whole)
        hits = [any(end in text for end in self._params.end_strings) for text in texts]
        stopped = torch.tensor(hits, device=lengths.device)
        stopped &= self._since_begin(samples, lengths) >= self._params.min_length
        self._stopped[samples] |= stopped
        return stopped

    def so_far(self) -> list[list[int]]:
        """Return the tokens of every response so far; waits for the device."""
        lengths = self._lengths[: len(self._begun)].tolist()
        return [
            row[:length]
            for row, length in zip(self._tokens[: len(lengths)].tolist(), lengths, strict=True)
        ]

    def last_tokens(self, samples: Tensor, written: Tensor) -> Tensor:
        """Return each row's token before position `written`: int64 [R]."""
        return self._tokens[samples, written - 1]

    def finish(self) -> Completions:
        """Return the responses, padded to the longest."""
        tokens, log_probs, lengths, stopped = (
            values[: len(self._begun)]
            for values in (self._tokens, self._log_probs, self._lengths, self._stopped)
        )
        width = int(lengths.max())
        return Completions(
            tokens=tokens[:, :width].cpu(),
            lengths=lengths.cpu(),
            finish_reasons=tuple(
                FINISH_STOP if is_stopped else FINISH_LENGTH for is_stopped in stopped.tolist()
            ),
            log_probs=log_probs[:, :width].cpu(),
        )

    def mark(self, version: int) -> None:
        """Record that weights of this version draw all further tokens."""
        self._marks.append((version, self._lengths.to("cpu", copy=True)))

    def collect_responses(self, version: int) -> list[PartialResponse]:
        """Return the responses with the added tokens.

        `version`: weight version of the tokens before the first `mark`.
        """
        added = self.finish()
        assert added.log_probs is not None
        lengths = added.lengths.tolist()
        stopped = self._stopped.tolist()
        responses = []
        for row, (response, length) in enumerate(zip(self._begun, lengths, strict=True)):
            marks = [
                (version, 0),
                *((newer, int(at[row])) for newer, at in self._marks),
                (0, length),
            ]
            versions = [
                old for (old, start), (_, end) in pairwise(marks) for _ in range(end - start)
            ]
            responses.append(
                self._extended(
                    response,
                    added.tokens[row, :length].tolist(),
                    added.log_probs[row, :length].tolist(),
                    versions,
                    is_stopped=stopped[row],
                )
            )
        return responses

    def collect_answer(self, row: int) -> PartialResponse:
        """Return a response that has ended, in a call whose weights do not change."""
        length = int(self._lengths[row])
        return self._extended(
            self._begun[row],
            self._tokens[row, :length].tolist(),
            self._log_probs[row, :length].tolist(),
            [0] * length,
            is_stopped=bool(self._stopped[row]),
        )

    def begin_again(self, row: int, response: PartialResponse) -> None:
        """Begin another response, which is empty, in a row."""
        self._begun[row] = response
        self._lengths[row] = 0
        self._stopped[row] = False
        if self._seen is not None:
            self._seen[row] = False
            self._seen[row, torch.tensor(response.prompt.tokens, device=self._seen.device)] = True

    def _extended(
        self,
        response: PartialResponse,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        *,
        is_stopped: bool,
    ) -> PartialResponse:
        is_full = len(response.tokens) + len(tokens) == response.max_length(self._params)
        return replace(
            response,
            tokens=(*response.tokens, *tokens),
            log_probs=(*response.log_probs, *log_probs),
            versions=(*response.versions, *versions),
            finish_reason=FINISH_STOP if is_stopped else FINISH_LENGTH if is_full else None,
        )


class Decoding:
    """Decoding state of one call. Earlier tokens of a response are read as the end of its prompt.

    Args:
        lm: the actor, within `whole_sequences`.
        max_tokens: bound on the cache; None for no bound.
        begun: unfinished responses; those without tokens are grouped by prompt.
        watch: called after each step with the tokens of all responses so far; an exception in it
            ends the call.
        updates: updates of the weights; None for none.
        renew: called after an update, to copy the weights again.
    """

    has_spare = False  # whether the responses have a scratch row
    parks = False  # whether responses that end are parked, see `Schedule`

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None,
        begun: Sequence[PartialResponse],
        params: SamplingParams,
        watch: Watch | None = None,
        updates: WeightUpdates | None = None,
        renew: Callable[[], None] = lambda: None,
    ):
        self._watch = watch
        self._updates = updates
        self._renew = renew
        self._lm = lm
        self._params = params
        self._pad_id = pad_id_of(tokenizer)
        self._device = lm.mesh.device
        self._responses = Responses(begun, params, tokenizer, self._device, self.has_spare)
        keyed = (
            (response.prompt.id, response.prompt.tokens, row if response.tokens else None)
            for row, response in enumerate(begun)
        )
        samples = [len(list(rows)) for _, rows in groupby(keyed)]  # per prompt
        firsts = np.cumsum([0, *samples])[:-1].tolist()
        self._prompts = [(*begun[row].prompt.tokens, *begun[row].tokens) for row in firsts]
        lengths = [len(tokens) for tokens in self._prompts]
        before = [len(response.tokens) for response in begun]
        limits = [
            response.max_length(params) - count
            for response, count in zip(begun, before, strict=True)
        ]
        most = max(limits)
        if self.parks:
            # Later turns are stored after the first answer.
            most = max(response.room(params) for response in begun)
        self._schedule = Schedule(lengths, samples, most, max_tokens, limits, parks=self.parks)
        self._sizes = self._schedule.slots, max(lengths), self._schedule.rows, most
        self._limits = torch.tensor(limits, device=self._device)
        self._is_mixed = len(set(limits)) > 1
        keys = position_keys(
            np.array([response.key for response in begun], dtype=np.uint64), params.max_length
        )
        for row, count in enumerate(before):
            if count:
                keys[row] = keys[row].roll(-count, dims=0)
        self._keys = keys.to(self._device)
        # Hidden states for the first tokens, on the last stage, by slot.
        size = lm.architecture.hidden_size
        dtype = lm.config.params_dtype
        self._of_prompts = torch.empty(
            (self._schedule.slots, size), dtype=dtype, device=self._device
        )
        self._most_rows = self._schedule.rows
        self._most_samples = max(samples)
        self._work: Workspace | None = None

    def _is_stopped(self) -> bool:
        """Apply `updates` before the next token; return True if the call ends."""
        updates = self._updates
        if updates is None:
            return False
        action = updates.next_action(self._schedule.unfinished)
        if action == "continue":
            return False
        if action == "stop":
            return True
        updates.load()
        self._renew()
        self._responses.mark(updates.version)
        if numbers := list(self._schedule.slot_of):
            # Only these: a waiting sample will begin with the new weights.
            self._read_prompts(numbers)
        return False

    def _read_prompts(self, numbers: Sequence[int]) -> None:
        """Run prompts, which have slots, through the model."""
        raise NotImplementedError

    def _prefill(self, numbers: Sequence[int], cache: Any) -> None:
        """Run the prompts through the model; the cache must be set to `read` them."""
        prompts = [torch.tensor(self._prompts[number]) for number in numbers]
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        tokens = torch.nn.utils.rnn.pad_sequence(
            prompts, batch_first=True, padding_value=self._pad_id
        )
        hidden = self._through_stages(tokens.to(self._device), None, cache)
        if hidden is not None:
            slots = [self._schedule.slot_of[number] for number in numbers]
            self._of_prompts[slots] = hidden[torch.arange(len(prompts), device=self._device), ends]

    def _through_stages(
        self, tokens: Tensor, positions: Tensor | None, cache: Any
    ) -> Tensor | None:
        """Return hidden states [b, s, h] on the last stage, else None; stages run in turn."""
        lm = self._lm
        mesh = self._lm.mesh
        if mesh.pp_rank > 0:
            received = self._room(*tokens.shape)
            mesh.receive_from_stage(received, mesh.pp_rank - 1)
            lm.set_input_tensor(received)
        hidden = lm(tokens, positions, cache)
        if mesh.is_last_stage:
            return hidden
        mesh.send_to_stage(hidden.contiguous(), mesh.pp_rank + 1)
        return None

    def _hand_on(self, hidden: Tensor | None, rows: int) -> Tensor | None:
        """Send `hidden` to the next stage while receiving `rows` rows from the previous stage.

        `hidden` is [1, R, h]; None sends nothing, and 0 rows receive nothing.
        """
        mesh = self._lm.mesh
        group = self._lm.mesh.pp_group
        received = self._room(rows, 1) if rows else None
        messages = []
        if hidden is not None:
            messages.append(
                dist.P2POp(
                    dist.isend, hidden.contiguous(), group=group, group_peer=mesh.pp_rank + 1
                )
            )
        if received is not None:
            messages.append(
                dist.P2POp(dist.irecv, received, group=group, group_peer=mesh.pp_rank - 1)
            )
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received

    def _room(self, rows: int, positions: int) -> Tensor:
        shape = (positions, rows, self._lm.architecture.hidden_size)
        return torch.empty(shape, dtype=self._lm.config.pipeline_dtype, device=self._device)

    def _next_tokens(
        self, hidden: Tensor | None, samples: Tensor, written: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw a token, int64 [R], and its log-prob, float32 [R], per row.

        `hidden` is [R, h] on the last stage.
        """
        mesh = self._lm.mesh
        rows = len(samples)
        tokens = torch.empty(rows, dtype=torch.long, device=self._device)
        log_probs = torch.empty(rows, dtype=torch.float32, device=self._device)
        if mesh.is_last_stage:
            assert hidden is not None
            logits = self._lm.full_logits(hidden)
            if self._work is None:
                self._work = Workspace(self._most_rows, logits.shape[1], logits.dtype, self._device)
            adjusted = self._responses.adjust(logits, samples, written)
            tokens = choose_tokens(adjusted, self._keys[samples, written], self._params, self._work)
            log_probs = token_log_probs(logits, tokens, self._params.temperature, self._work)
        mesh.copy_from_last_stage(tokens)
        mesh.copy_from_last_stage(log_probs)
        return tokens, log_probs


class PlainDecoding(Decoding):
    """Decode one token per unfinished row at a time; row state is on the device."""

    def __init__(self, *call: Any):
        super().__init__(*call)
        self._cache = self._lm.new_cache(*self._sizes)
        # Hidden states for the next tokens, on the last stage, by row.
        self._hidden = self._of_prompts[:0]

    def run(self) -> Responses:
        while self._admit():
            tokens = self._draw()
            if self._watch is not None:
                self._watch(self._responses.so_far())
            if self._is_stopped():
                break
            self._advance(tokens)
        return self._responses

    def _admit(self) -> bool:
        """Fill free rows with waiting samples; return False when none is left."""
        before = len(self._schedule.running)
        unread = self._schedule.admit()
        if unread:
            self._read_prompts(unread)
        if len(self._schedule.running) > before:
            self._place()
            self._hidden = torch.cat((self._hidden, self._of_prompts[self._slots[before:]]))
        return bool(self._schedule.running)

    def _read_prompts(self, numbers: Sequence[int]) -> None:
        self._cache.read([self._schedule.slot_of[number] for number in numbers])
        self._prefill(numbers, self._cache)

    def _place(self) -> None:
        running = self._schedule.running
        self._cache.move(self._schedule.settle())
        self._samples, self._slots, self._lengths, self._before, self._written = torch.tensor(
            [
                (
                    sequence.sample,
                    sequence.slot,
                    self._prompt_length(sequence),
                    sequence.before,
                    sequence.written,
                )
                for sequence in running
            ],
            device=self._device,
        ).unbind(dim=1)
        self._cache.place([sequence.slot for sequence in running])

    def _prompt_length(self, sequence: Running) -> int:
        """Return the tokens of the prompt in its slot that the row sees."""
        return len(self._prompts[sequence.prompt])

    def _draw(self) -> Tensor:
        """Draw, record and return each row's next token, int64 [R]."""
        tokens, log_probs = self._next_tokens(self._hidden, self._samples, self._written)
        ended = self._responses.append(self._samples, self._written, tokens, log_probs)
        order = self._schedule.advance(ended)
        if order is None:
            self._written = self._written + 1
            return tokens
        if order:
            self._place()
        return tokens[order]

    def _advance(self, tokens: Tensor) -> None:
        """Feed the drawn tokens int64 [R] to the model."""
        if not len(tokens):
            self._hidden = self._hidden[:0]
            return
        # This pass computes the keys of the last token.
        stored = self._before + self._written - 1
        self._cache.at(self._lengths, stored, self._schedule.longest)
        hidden = self._through_stages(
            tokens[:, None], (self._lengths + stored)[:, None], self._cache
        )
        if hidden is not None:
            self._hidden = hidden[:, 0]
