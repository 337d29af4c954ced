"""Hugging Face folder to megatron checkpoint and back, at any tensor-parallel size. See docs/checkpoints.md.

Examples:
    python examples/convert_checkpoint.py to-megatron Qwen2.5-7B checkpoints/qwen --tp 2
    python examples/convert_checkpoint.py to-hf checkpoints/qwen exported/qwen
    python examples/convert_checkpoint.py to-hf results/my_run exported/my_run --model Qwen2.5-7B
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.cli import start_ranks

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: no hub


def main() -> int:
    args = parse_arguments()
    try:
        start_ranks(args.tp, 1)
        convert(args)
    except ReinforceError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("to-megatron", help="Hugging Face folder to checkpoint, weights alone")
    to_megatron.add_argument("source", type=Path, help="Hugging Face folder: config.json, safetensors, tokenizer")
    to_hf = commands.add_parser("to-hf", help="checkpoint to Hugging Face folder")
    to_hf.add_argument("source", type=Path, help="a run, one of its checkpoints, or what to-megatron wrote")
    to_hf.add_argument("--model", type=Path, help="Hugging Face folder that gives config and tokenizer of a run")
    to_hf.add_argument("--max-shard-gb", type=float, default=5.0, help="size of one file of weights (default: 5)")
    for command in (to_megatron, to_hf):
        command.add_argument("out", type=Path, help="the folder to write; replaced where it exists")
        command.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks that do it (default: 1)")
        command.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they are)"
        )
    args = parser.parse_args()
    if args.tp < 1:
        parser.error(f"--tp is {args.tp}; expected at least 1")
    return args


def convert(args: argparse.Namespace) -> None:
    import torch
    from rich.progress import track

    from reinforce_rl.megatron.convert import to_hf, to_megatron
    from reinforce_rl.megatron.mesh import parallel_mesh

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    with parallel_mesh(args.tp) as mesh:
        show = functools.partial(track, description=f"{args.source} -> {args.out}") if mesh.is_main else iter
        if args.command == "to-megatron":
            to_megatron(args.source, args.out, mesh, dtype=dtype, track=show)
        else:
            size = int(args.max_shard_gb * 1e9)
            to_hf(args.source, args.out, mesh, model=args.model, dtype=dtype, max_shard_bytes=size, track=show)
        if mesh.is_main:
            print(f"written to {args.out}")


if __name__ == "__main__":
    sys.exit(main())
