"""The reference policy: the actor with the weights of step 0 for a pass, and with its own again after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from reinforce_rl.megatron.lora import updates_off
from reinforce_rl.megatron.model.model import CausalLM


class Reference(Protocol):
    """What the actor asks of a reference policy."""

    def swapped_in(self) -> AbstractContextManager[None]:
        """The model is the reference inside the block, itself again after it; no gradient may flow."""
        ...


class ReferencePolicy:
    """A frozen copy of a model's weights.

    It must be taken before a checkpoint is restored: the reference is the policy at step 0 of the run, never that of
    a resumed one.

    Args:
        model: whose present weights are copied.
        on_device: keep the copy where the model is, which costs its memory all the time. Else it lies on the host, and
            each pass takes the time of its transfer.
    """

    def __init__(self, model: torch.nn.Module, *, on_device: bool = False):
        self._model = model
        pin = torch.cuda.is_available() and not on_device
        self._weights = {}
        for name, parameter in model.named_parameters():
            copy = parameter.detach().to(parameter.device if on_device else "cpu", copy=True)
            self._weights[name] = copy.pin_memory() if pin else copy

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the reference's weights inside the block, its own again after it; no gradient may flow."""
        own = {name: parameter.data for name, parameter in self._model.named_parameters()}
        try:
            for name, parameter in self._model.named_parameters():
                # Only the pointer moves: the optimizer's own buffers keep the actor's weights meanwhile.
                parameter.data = self._weights[name].to(parameter.device, non_blocking=True)
            yield
        finally:
            for name, parameter in self._model.named_parameters():
                parameter.data = own[name]


class FrozenBase:
    """The reference of a LoRA actor: its own frozen weights without their updates. There is no copy.

    Args:
        lm: a model with updates.
    """

    def __init__(self, lm: CausalLM):
        self._lm = lm

    def swapped_in(self) -> AbstractContextManager[None]:
        """See `Reference`."""
        return updates_off(self._lm)
