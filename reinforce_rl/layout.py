"""What cannot work of a layout of ranks or of recomputation, told without torch, before a model is loaded."""

from __future__ import annotations

RECOMPUTE_GRANULARITIES = ("selective", "full")
RECOMPUTE_METHODS = ("uniform", "block")


def layout_faults(
    tensor: int,
    pipeline: int,
    context: int,
    sequence_parallel: bool,
    world_size: int,
    ranks: str,
    section: str = "model",
) -> list[str]:
    """What is wrong with a layout, one sentence a fault.

    Args:
        tensor, pipeline, context: the three model-parallel sizes, each at least 1.
        sequence_parallel: as configured.
        world_size: ranks of the job.
        ranks: how to call them in the message.
        section: of the configuration that has the keys.
    """
    faults = []
    sizes = {
        f"{section}.tensor_model_parallel_size": tensor,
        f"{section}.pipeline_model_parallel_size": pipeline,
        f"{section}.context_parallel_size": context,
    }
    block = tensor * pipeline * context
    if world_size % block:
        used = {key: size for key, size in sizes.items() if size > 1}
        if len(used) == 1:
            key, size = next(iter(used.items()))
            faults.append(f"{key} is {size}, which does not divide the {world_size} ranks of {ranks}")
        else:
            factors = " x ".join(f"{key} ({size})" for key, size in used.items())
            faults.append(f"{factors} is {block}, which does not divide the {world_size} ranks of {ranks}")
    if sequence_parallel and tensor == 1:
        faults.append(
            f"{section}.sequence_parallel is true with {section}.tensor_model_parallel_size=1; it shares positions "
            "among tensor-parallel ranks, so set that above 1 or this to false"
        )
    return faults


def recomputation_faults(granularity: str | None, method: str | None, num_layers: int | None) -> list[str]:
    """What is wrong with `model.activations_checkpoint_*`, one sentence a fault."""
    key = "model.activations_checkpoint_"
    if granularity not in (None, *RECOMPUTE_GRANULARITIES):
        return [f"{key}granularity is {granularity!r}; expected null, {' or '.join(RECOMPUTE_GRANULARITIES)}"]
    faults = []
    if granularity == "full":
        if method not in RECOMPUTE_METHODS:
            faults.append(
                f"{key}method is {method!r} with granularity=full; expected {' or '.join(RECOMPUTE_METHODS)}"
            )
        if num_layers is None:
            faults.append(f"{key}num_layers is null with granularity=full; expected a number of layers, such as 1")
    elif method is not None or num_layers is not None:
        faults.append(
            f"{key}method is {method!r} and num_layers is {num_layers!r}, which only granularity=full reads; "
            f"it is {granularity!r}"
        )
    return faults
