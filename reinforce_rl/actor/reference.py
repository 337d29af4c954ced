"""The reference policy: the weights at step 0, swapped into the actor for a pass and out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class ReferencePolicy:
    """A frozen copy of a model's weights on the host.

    It must be taken before a checkpoint is restored: the reference is the policy at step 0 of the run, never that of
    a resumed one.

    Args:
        model: whose present weights are copied.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        pin = torch.cuda.is_available()
        self._weights = {}
        for name, parameter in model.named_parameters():
            copy = parameter.detach().to("cpu", copy=True)
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
