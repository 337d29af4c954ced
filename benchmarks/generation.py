"""Tokens a second of the native engine and of transformers' `generate`, or of vLLM, in turns.

python benchmarks/generation.py                              (SmolLM2-135M, fp32; about 2 minutes on 2 cores)
python benchmarks/generation.py --prompt-tokens 256 --group 8
python benchmarks/generation.py --vllm .venv-engine/bin/python                   (vLLM in place of transformers)
python benchmarks/generation.py --short                      (a tiny random model, one pair: does it work at all?)

The same weights, prompts of equal length, samples a prompt and threads; both sample at temperature 1, and no response
may end before its last token. One call of each does not count. The last line of the output is `speedup: N.NNx`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from rloo_step.inputs import make_prompts  # noqa: E402

from reinforce_rl.config.engines import EngineConfig, VLLMConfig  # noqa: E402
from reinforce_rl.data.batches import Prompt  # noqa: E402
from reinforce_rl.data.tokenizer import load_tokenizer  # noqa: E402
from reinforce_rl.generation.base import SamplingParams  # noqa: E402
from reinforce_rl.generation.engine.generator import EngineGenerator  # noqa: E402
from reinforce_rl.generation.native.generator import NativeGenerator  # noqa: E402
from reinforce_rl.generation.vllm.adapter import VLLM  # noqa: E402
from reinforce_rl.megatron.architecture import Architecture  # noqa: E402
from reinforce_rl.megatron.hf_folder import HFFolder  # noqa: E402
from reinforce_rl.megatron.hf_weights import load_hf_weights  # noqa: E402
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh  # noqa: E402
from reinforce_rl.megatron.model.model import CausalLM  # noqa: E402

OURS = "native engine"
PEER = "transformers"
ENGINE = "vLLM"
SHORT = {
    "pairs": 1,
    "prompts": 2,
    "group": 2,
    "prompt_tokens": 8,
    "response_tokens": 6,
    "threads": 1,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face folder; default: SmolLM2-135M-Instruct, made if missing",
    )
    parser.add_argument("--prompts", type=int, default=4, help="a call (%(default)s)")
    parser.add_argument("--group", type=int, default=4, help="samples a prompt, G (%(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, help="of each prompt (%(default)s)"
    )
    parser.add_argument(
        "--response-tokens", type=int, default=48, help="of each response (%(default)s)"
    )
    parser.add_argument(
        "--cache-tokens", type=int, help="bound on the native engine's KV cache; default: none"
    )
    parser.add_argument(
        "--pairs", type=int, default=5, help="of calls, one of each side (%(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch (%(default)s)"
    )
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="vLLM's interpreter; vLLM is then the other side"
    )
    parser.add_argument(
        "--short", action="store_true", help="a tiny random model, one pair of small calls"
    )
    parser.set_defaults(**(SHORT if "--short" in sys.argv[1:] else {}))
    return parser.parse_args()


def model_folder(model: Path | None, short: bool, scratch: Path) -> Path:
    """The model that was asked for."""
    if model is not None:
        return model
    if short:
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers.models import tiny_llama_folder

        return tiny_llama_folder(scratch / "model", vocab_size=128)
    from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2

    return prepare_smollm2(ROOT / DEFAULT_FOLDER)


def native_side(
    folder: Path, mesh: Mesh, prompts: list[Prompt], args: argparse.Namespace
) -> Callable[[int], Tensor]:
    """Draws with a seed: the response tokens [N, T]."""
    lm = CausalLM(Architecture.from_folder(folder), mesh)
    load_hf_weights(lm, HFFolder(folder))
    engine = NativeGenerator(lm, load_tokenizer(folder), args.cache_tokens)
    params = SamplingParams(max_length=args.response_tokens)
    return lambda seed: engine.generate(prompts, args.group, params, seed).tokens


def peer_side(
    folder: Path, prompts: list[Prompt], args: argparse.Namespace
) -> Callable[[int], Tensor]:
    """As `native_side`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    model.eval()
    tokens = torch.tensor([prompt.tokens for prompt in prompts for _ in range(args.group)])
    count = args.response_tokens

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with torch.inference_mode():
            sequences = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        return sequences[:, tokens.shape[1] :]

    return draw


@contextlib.contextmanager
def vllm_side(
    folder: Path, mesh: Mesh, prompts: list[Prompt], args: argparse.Namespace, scratch: Path
) -> Iterator[Callable[[int], Tensor]]:
    """As `native_side`, by the trainer's own adapter; weights have been sent before."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    lm = CausalLM(Architecture.from_folder(folder), mesh)
    load_hf_weights(lm, HFFolder(folder))
    config = EngineConfig(python=args.vllm)
    length = args.prompt_tokens + args.response_tokens
    tokenizer = load_tokenizer(folder)
    engine = EngineGenerator(
        lm,
        tokenizer,
        VLLM(VLLMConfig()),
        config,
        model=folder,
        max_seq_len=length,
        log_folder=scratch,
    )
    params = SamplingParams(max_length=args.response_tokens)
    with contextlib.closing(engine), engine.awake():
        yield lambda seed: engine.generate(prompts, args.group, params, seed).tokens


def measure(
    sides: dict[str, Callable[[int], Tensor]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each side's calls; who begins alternates.

    Raises:
        ValueError: a side did not make the tokens that were asked for.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shape = (args.prompts * args.group, args.response_tokens)
    for number in range(args.pairs + 1):
        for name in sides if number % 2 == 0 else reversed(sides):
            started = time.perf_counter()
            sequences = sides[name](number)
            took = time.perf_counter() - started
            if sequences.shape != shape:
                raise ValueError(
                    f"{name} made tokens of shape {tuple(sequences.shape)}, expected {shape}"
                )
            if number:  # memory is touched and threads are started in the first
                seconds[name].append(took)
                print(f"pair {number} of {args.pairs}: {name}, {took:.2f} s", file=sys.stderr)
    return seconds


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch, parallel_mesh(seed=0) as mesh:
        folder = model_folder(args.model, args.short, Path(scratch))
        tokenizer = load_tokenizer(folder)
        (texts,) = make_prompts(tokenizer, 1, args.prompts, args.prompt_tokens)
        prompts = [Prompt(i, text, tuple(tokenizer.encode(text))) for i, text in enumerate(texts)]
        with contextlib.ExitStack() as stack:
            sides = {OURS: native_side(folder, mesh, prompts, args)}
            if args.vllm is None:
                sides[PEER] = peer_side(folder, prompts, args)
            else:
                sides[ENGINE] = stack.enter_context(
                    vllm_side(folder, mesh, prompts, args, Path(scratch))
                )
            seconds = measure(sides, args)
    count = args.prompts * args.group * args.response_tokens
    shape = f"{args.prompts} prompts x {args.group}, {args.prompt_tokens} + {args.response_tokens} tokens"
    table = Table(title=f"{folder.name}, float32: {shape}, {args.threads} threads")
    for name in ("", "median seconds", "tokens a second"):
        table.add_column(name, justify="right" if name else "left")
    for name, values in seconds.items():
        median = statistics.median(values)
        table.add_row(name, f"{median:.2f}", f"{count / median:.1f}")
    ratios = [peer / ours for ours, peer in zip(*seconds.values(), strict=True)]
    console = Console(width=119)
    console.print(table)
    console.print(
        f"each pair: {' '.join(f'{r:.2f}' for r in ratios)}; load {os.getloadavg()[0]:.1f}",
        highlight=False,
    )
    print(f"speedup: {statistics.median(ratios):.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
