"""The actor: rollouts, log-probs under the policy and the reference, and the gradient of the loss.

Notation: N sequences on this data-parallel rank, S prompt plus response, T response tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators, LossInputs, LossSettings, policy_loss
from reinforce_rl.config.model import ModelConfig
from reinforce_rl.data.batches import Completions, Prompt, ReinforceBatch, length_mask
from reinforce_rl.data.tokenizer import pad_id_of
from reinforce_rl.generation.base import Generator, SamplingParams
from reinforce_rl.megatron.hf_weights import export_hf_folder
from reinforce_rl.megatron.lora import MergedWeights, export_adapter, lora_settings_of, updates_off
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.log_probs import TokenScores, response_scores
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.sequences import (
    Contexts,
    ContextSequences,
    PackedGroups,
    PaddedSequences,
    SequenceLayout,
    split_contexts,
    to_device,
)
from reinforce_rl.megatron.optimizer import DistributedDataParallel, wrap_data_parallel
from reinforce_rl.megatron.schedule import accumulate_gradients, forward_passes
from reinforce_rl.policy.micro_batches import (
    micro_batches,
    micro_batches_of_episodes,
    packed_micro_batches,
    packed_tokens,
    padding,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReferencePolicy:
    """A frozen copy of a model's current weights, on its device or on the host.

    Each pass transfers a copy on the host to the device.

    Create it before a checkpoint is restored: the reference is the policy at step 0, also in a
    resumed run.
    """

    def __init__(self, model: torch.nn.Module, *, on_device: bool = False):
        self._model = model
        self._weights = {}
        for name, parameter in model.named_parameters():
            copy = parameter.detach().to(parameter.device if on_device else "cpu", copy=True)
            self._weights[name] = (
                copy.pin_memory() if torch.cuda.is_available() and not on_device else copy
            )

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap in the reference's weights within the block; no gradient may flow."""
        policy_weights = [
            (name, parameter, parameter.data) for name, parameter in self._model.named_parameters()
        ]
        try:
            for name, parameter, _ in policy_weights:
                # Swap pointers only: the optimizer's buffers keep the actor's weights.
                parameter.data = self._weights[name].to(parameter.device, non_blocking=True)
            yield
        finally:
            for _, parameter, data in policy_weights:
                parameter.data = data


DEFAULT_LOSS = LossSettings()
LOSS = "loss"  # key of the loss among a micro-batch's sums
Part = TypeVar("Part")
Made = TypeVar("Made")


@dataclass(frozen=True)
class LossShare:
    loss: float  # the sum over data-parallel ranks is the loss
    sums: dict[str, float]  # of `policy_loss`, plus tokens with and without padding
    # float32 [N, T] under the policy; NaN for rows outside this optimizer step. Off-policy, all are
    # NaN.
    log_probs: Tensor | None = None


class MegatronGPTReinforceActorModel:
    """Policy and reference on one megatron model.

    Args:
        lm: the policy at step 0, of which the reference is a copy. With LoRA only the updates
            train, and the reference is the model without them.
        settings: the section `model`.
        sampling: of training rollouts. Its temperature applies to all log-probs, also under the
            reference.
        val_sampling: of validation rollouts; None for `sampling`.
        pad_to: pad rows to this many tokens, so that shapes are static; longer rows are not cut. 0
            pads to the longest row.
        with_reference: False saves the reference's memory if beta is 0.
        lora: `LoraSettings.identity`, for checkpoints; None if the whole model trains.
        trains: False saves the gradients' memory if the model only generates and scores.
        max_response_tokens: of an episode's answers and what an environment writes between them;
            None for `sampling.max_length`.
    """

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        generator: Generator,
        settings: ModelConfig,
        sampling: SamplingParams,
        val_sampling: SamplingParams | None = None,
        *,
        loss: LossSettings = DEFAULT_LOSS,
        pad_to: int = 0,
        with_reference: bool = True,
        lora: dict[str, Any] | None = None,
        trains: bool = True,
        max_response_tokens: int | None = None,
    ):
        self.lm = lm
        self.tokenizer = tokenizer
        self.generator = generator
        self.settings = settings
        self.sampling = sampling
        self.val_sampling = val_sampling or sampling
        self.max_response_tokens = max_response_tokens or sampling.max_length
        self.loss = loss
        self.lora = lora
        on_gpu = lm.mesh.device.type != "cpu"
        self.chunk_tokens = settings.chunk_tokens(gpu=on_gpu)
        # Each prompt is then read once, without padding.
        self.shares_prefix = settings.shares_prefix(gpu=on_gpu, is_padded=pad_to > 0)
        self._pad_to = pad_to
        self._ddp = wrap_data_parallel(lm, settings.optim) if trains else None
        self._as_reference: Callable[[], AbstractContextManager[None]] | None = None
        if with_reference and lora_settings_of(lm) is not None:
            # The reference is the frozen weights without the updates.
            self._as_reference = partial(updates_off, lm)
        elif with_reference:
            on_device = settings.reference_placement == "device"
            self._as_reference = ReferencePolicy(lm, on_device=on_device).swapped_in

    @property
    def mesh(self) -> Mesh:
        return self.lm.mesh

    @property
    def ddp(self) -> DistributedDataParallel:
        """The policy with its gradient buffers. Raises RuntimeError without gradients."""
        if self._ddp is None:
            raise RuntimeError("this actor was built without gradients (trains=False)")
        return self._ddp

    @property
    def pad_id(self) -> int:
        return pad_id_of(self.tokenizer)

    def infer(
        self, prompts: Sequence[Prompt], num_samples: int, seed: int, *, validation: bool = False
    ) -> Completions:
        """Generate `num_samples` responses per prompt, in prompt-major order.

        Uses the training or the validation sampling.
        """
        params = self.val_sampling if validation else self.sampling
        completions = self.generator.generate(prompts, num_samples, params, seed)
        return completions.within_vocabulary(self.lm.architecture.vocab_size, self.pad_id)

    def get_inference_log_probs(
        self,
        sequences: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        group_ids: Tensor | None = None,
        response_mask: Tensor | None = None,
        history_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute log-probs of the response tokens under the policy.

        Args:
            sequences: int64 [N, S], right-padded.
            group_ids: int64 [N], equal for equal prompts; None if unknown.
            response_mask: bool [N, T], the tokens to compute; None for all of each response.
            history_mask: bool [N, T], as in `Completions`.

        Returns:
            float32 [N, T] on the CPU; 0 outside the mask.
        """
        width = int(response_lengths.max()) if len(response_lengths) else 0
        out = torch.zeros((len(sequences), width))
        samples = _samples(
            sequences, prompt_lengths, response_lengths, group_ids, response_mask, history_mask
        )
        size = self.settings.reinforce.forward_micro_batch_size
        micro_batch_rows = self._make_micro_batches(samples, size)
        if not micro_batch_rows:
            return out
        self.lm.eval()
        log_probs = forward_passes(
            self.lm,
            _Made(micro_batch_rows, lambda rows: self._layout(samples.select(rows))),
            lambda model, layout: layout.hidden(model),
            lambda hidden, layout: self._scores(layout, hidden, width).log_probs,
            lambda layout: layout.stage_shape,
        )
        self.lm.train()
        if log_probs:  # on the last stage only; one copy from the device for all passes
            out[torch.cat(micro_batch_rows)] = torch.cat(log_probs).float().cpu()
        return self.mesh.from_last_stage(out)

    def get_init_policy_logprobs(
        self,
        sequences: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        group_ids: Tensor | None = None,
        response_mask: Tensor | None = None,
        history_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute `get_inference_log_probs` under the reference policy.

        Raises RuntimeError without a reference.
        """
        if self._as_reference is None:
            raise RuntimeError(
                "this actor was built without a reference policy (with_reference=False)"
            )
        with self._as_reference():
            return self.get_inference_log_probs(
                sequences, prompt_lengths, response_lengths, group_ids, response_mask, history_mask
            )

    def reference_weights(self) -> Iterator[Tensor]:
        """Yield the reference's weights on this rank; with LoRA, the frozen weights.

        Yields nothing without a reference.
        """
        if self._as_reference is not None:
            with self._as_reference():
                parameters = list(self.lm.parameters())
                frozen = [parameter for parameter in parameters if not parameter.requires_grad]
                yield from (parameter.data for parameter in frozen or parameters)

    def get_loss_and_metrics(
        self,
        batch: ReinforceBatch,
        denominators: Denominators,
        *,
        rows: Tensor | None = None,
        kl_coefficient: float | None = None,
        on_policy: bool = True,
    ) -> LossShare:
        """Zero the gradient buffers and accumulate the gradient of the loss into them.

        Args:
            denominators: over all data-parallel ranks.
            kl_coefficient: of the KL in the loss; None if the loss has no KL.
            rows: int64 indices of this optimizer step's samples; None for all.
            on_policy: no optimizer step since sampling, so every ratio is exactly 1.
        """
        rollouts = batch.rollouts
        rows = torch.arange(len(batch.trains)) if rows is None else rows
        trained = rows[batch.trains[rows]]
        samples = _samples(*rollouts.sequence_inputs)
        micro_batch_size = self.settings.micro_batch_size
        micro_batch_rows = [
            trained[indices]
            for indices in self._make_micro_batches(samples.select(trained), micro_batch_size)
        ]
        # A rank without samples still runs an empty pass: the collectives of the other ranks wait
        # for it.
        parts: list[Tensor | None] = [*micro_batch_rows] or [None]
        seen: list[tuple[Tensor, Tensor]] = []  # rows and their log-probs

        def layout_of(rows: Tensor | None) -> tuple[Tensor | None, SequenceLayout]:
            if rows is not None:
                return rows, self._layout(samples.select(rows))
            zero = torch.zeros(1, dtype=torch.long)
            token = torch.full((1, 1), self.pad_id)
            return None, self._layout(_samples(token, zero + 1, zero, zero))

        def loss_of(
            hidden: Tensor, part: tuple[Tensor | None, SequenceLayout]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            rows, layout = part
            if rows is None:
                return self._scores(layout, hidden, 1).log_probs.sum(), {}
            lengths = rollouts.response_lengths[rows]
            width = int(lengths.max())
            scores = self._scores(layout, hidden, width, with_entropy=True)
            if on_policy:
                seen.append((rows, scores.log_probs.detach()))
            values = {
                "advantages": batch.advantages,
                "old_log_probs": None if on_policy else rollouts.log_probs,
                "generator_log_probs": rollouts.generator_log_probs,
                "reference_log_probs": rollouts.init_log_probs,
            }
            inputs = {name: each[rows, :width] for name, each in values.items() if each is not None}
            mask = samples.response_mask[rows, :width]
            inputs |= {"mask": mask, "trains": batch.trains[rows]}
            moved = to_device(list(inputs.values()), scores.log_probs.device)
            moved = LossInputs(**dict(zip(inputs, moved, strict=True)))
            options = (denominators, self.loss, kl_coefficient)
            share, sums = policy_loss(scores.log_probs, scores.entropy, moved, *options)
            return share, {LOSS: share.detach(), **sums}

        self.lm.train()
        pass_sums = accumulate_gradients(
            self.ddp,
            _Made(parts, layout_of),
            lambda model, part: part[1].hidden(model),
            loss_of,
            lambda part: part[1].stage_shape,
        )
        shares = self.mesh.from_last_stage(_as_floats(pass_sums))
        names = dict.fromkeys(name for share in shares for name in share)
        sums = {name: math.fsum(share[name] for share in shares) for name in names}
        loss = sums.pop(LOSS, 0.0)
        sums["sequence_tokens"], sums["padded_tokens"] = self._tokens_of(samples, micro_batch_rows)
        log_probs = torch.full(rollouts.response_mask.shape, math.nan)
        if seen:  # one copy from the device, since each copy waits for the device
            flat = torch.cat([values.flatten() for _, values in seen]).float().cpu()
            sizes = [values.numel() for _, values in seen]
            for (sample_rows, values), row_log_probs in zip(seen, flat.split(sizes), strict=True):
                log_probs[sample_rows, : values.shape[1]] = row_log_probs.view(values.shape)
        return LossShare(loss, sums, self.mesh.from_last_stage(log_probs))

    def export(self, source: str | Path, out: str | Path, step: int | None = None) -> Path:
        """Write the policy as a Hugging Face folder with LoRA updates merged; a collective call."""
        merged = None if lora_settings_of(self.lm) is None else MergedWeights(self.lm)
        return export_hf_folder(self.lm, source, out, values=merged, step=step)

    def export_adapter(self, source: str | Path, out: str | Path) -> Path:
        """Write the LoRA updates as a PEFT folder; a collective call."""
        return export_adapter(self.lm, source, out)

    def _layout(self, samples: _Samples) -> SequenceLayout:
        contexts = samples.contexts(self.pad_id)
        if contexts is None:
            return self._layout_of_sequences(samples)
        layout = self._layout_of_sequences(contexts)
        return ContextSequences(layout, contexts, samples.response_lengths, self.mesh.device)

    def _layout_of_sequences(self, samples: _Samples | Contexts) -> PaddedSequences | PackedGroups:
        inputs = (samples.sequences, samples.prompt_lengths, samples.response_lengths)
        mask = samples.response_mask
        if self.shares_prefix:
            return PackedGroups(self.lm, *inputs, samples.group_ids, response_mask=mask)
        padding = {"pad_to": self._pad_to, "pad_id": self.pad_id}
        return PaddedSequences(self.lm, *inputs, response_mask=mask, **padding)

    def _make_micro_batches(self, samples: _Samples, size: int) -> list[Tensor]:
        most = self.settings.tokens_per_micro_batch
        if self.shares_prefix:
            lengths = (samples.prompt_lengths, samples.response_lengths)
            return packed_micro_batches(samples.group_ids, *lengths, size, most)
        contexts = samples.contexts()
        if contexts is None:
            return micro_batches(samples.lengths.clamp(min=self._pad_to), size, most)
        # Every context is a row of a pass, and the contexts of an episode are in the same pass.
        lengths_of_contexts = contexts.lengths.clamp(min=self._pad_to)
        return micro_batches_of_episodes(lengths_of_contexts, contexts.rows, size, most)

    def _tokens_of(self, samples: _Samples, micro_batch_rows: list[Tensor]) -> tuple[int, int]:
        """Return the number of tokens that the passes read, without and with padding."""
        if self.shares_prefix:
            parts = [samples.select(rows) for rows in micro_batch_rows]
            tokens = sum(
                packed_tokens(p.group_ids, p.prompt_lengths, p.response_lengths) for p in parts
            )
            return tokens, tokens
        contexts = samples.contexts()
        if contexts is None:
            return padding(samples.lengths, micro_batch_rows, self._pad_to)
        passes = [torch.isin(contexts.rows, rows).nonzero()[:, 0] for rows in micro_batch_rows]
        return padding(contexts.lengths, passes, self._pad_to)

    def _scores(
        self, layout: SequenceLayout, hidden: Tensor, width: int, with_entropy: bool = False
    ) -> TokenScores:
        return response_scores(
            layout,
            hidden,
            self.lm,
            self.sampling.temperature,
            width,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
        )


def _as_floats(sums_by_pass: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    scalars = [scalar.double() for part in sums_by_pass for scalar in part.values()]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])
    return [{name: next(numbers) for name in part} for part in sums_by_pass]


class _Made(Sequence[Made]):
    """Lazily built inputs of each pass, so that only one attention mask exists at a time."""

    def __init__(self, parts: Sequence[Part], make: Callable[[Part], Made]):
        self._parts = parts
        self._make = make

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        return self._make(self._parts[index])


class _Samples(NamedTuple):
    sequences: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    group_ids: Tensor
    response_mask: Tensor  # bool [N, T]
    history_mask: Tensor | None  # bool [N, T]

    @property
    def lengths(self) -> Tensor:
        return self.prompt_lengths + self.response_lengths

    def select(self, rows: Tensor) -> _Samples:
        history_mask = None if self.history_mask is None else self.history_mask[rows]
        tensors = [part[rows] for part in self[:-1]]
        return _Samples(*tensors, history_mask=history_mask)

    def contexts(self, pad_id: int = 0) -> Contexts | None:
        """Split the samples; None if each is one context."""
        history_mask = self.history_mask
        if history_mask is None or not bool(history_mask.any()):
            return None
        return split_contexts(*self[:-1], history_mask, pad_id=pad_id)


def _samples(
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    group_ids: Tensor | None,
    response_mask: Tensor | None = None,
    history_mask: Tensor | None = None,
) -> _Samples:
    if group_ids is None:
        # No two samples share a prompt.
        group_ids = torch.arange(len(sequences))
    if response_mask is None:
        width = int(response_lengths.max()) if len(response_lengths) else 0
        response_mask = length_mask(response_lengths, width)
    return _Samples(
        sequences, prompt_lengths, response_lengths, group_ids, response_mask, history_mask
    )
