"""How ranks may be laid out, told without torch: asked before a model is loaded and again where ranks start."""

from __future__ import annotations


def layout_faults(
    tensor: int, pipeline: int, context: int, sequence_parallel: bool, world_size: int, ranks: str
) -> list[str]:
    """What is wrong with a layout, one sentence a fault.

    Args:
        tensor, pipeline, context: the three model-parallel sizes, each at least 1.
        sequence_parallel: as configured.
        world_size: ranks of the job.
        ranks: how to call them in the message.
    """
    faults = []
    sizes = {
        "model.tensor_model_parallel_size": tensor,
        "model.pipeline_model_parallel_size": pipeline,
        "model.context_parallel_size": context,
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
            "model.sequence_parallel is true with model.tensor_model_parallel_size=1; it shares positions among "
            "tensor-parallel ranks, so set that above 1 or this to false"
        )
    return faults
