"""The command `convert`: a Hugging Face folder to a megatron checkpoint and back.

It works at any tensor-parallel size.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.terminal import start_ranks
from reinforce_rl.utils.job_rank import is_first_rank

Out = Annotated[Path, typer.Argument(help="the folder to write; replaced where it exists")]
Ranks = Annotated[int, typer.Option("--tp", min=1, help="tensor-parallel ranks to use")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="default: as in the source"),
]

convert = typer.Typer(
    help="Convert a Hugging Face folder to a checkpoint and back. See docs/checkpoints.md."
)


@convert.command("to-megatron")
def to_megatron(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face folder: config.json, safetensors, tokenizer")
    ],
    out: Out,
    tp: Ranks = 1,
    dtype: Dtype = None,
) -> None:
    """Hugging Face folder to checkpoint, weights alone."""
    _convert("to_megatron", source, out, tp, dtype)


@convert.command("to-hf")
def to_hf(
    source: Annotated[
        Path, typer.Argument(help="a run, one of its checkpoints, or what to-megatron wrote")
    ],
    out: Out,
    model: Annotated[
        Path | None, typer.Option(help="folder with config and tokenizer, for a run")
    ] = None,
    max_shard_gb: Annotated[float, typer.Option(help="size of one file of weights")] = 5.0,
    tp: Ranks = 1,
    dtype: Dtype = None,
) -> None:
    """Checkpoint to Hugging Face folder."""
    _convert("to_hf", source, out, tp, dtype, model=model, max_shard_bytes=int(max_shard_gb * 1e9))


def _convert(how: str, source: Path, out: Path, tp: int, dtype: str | None, **options: Any) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # set before any library reads it
    start_ranks(tp, 1)
    import torch
    from rich.progress import track

    from reinforce_rl.megatron import convert
    from reinforce_rl.megatron.mesh import parallel_mesh

    if dtype is not None:
        options["dtype"] = getattr(torch, dtype)
    try:
        with parallel_mesh(tp) as mesh:
            show = (
                functools.partial(track, description=f"{source} -> {out}") if mesh.is_main else iter
            )
            getattr(convert, how)(source, out, mesh, track=show, **options)
            if mesh.is_main:
                print(f"written to {out}")
    except ReinforceError:
        if is_first_rank():
            raise
        sys.exit(1)  # rank 0 reports it
