"""Compare a step's record in Parquet with compressed JSON lines of the same content.

python benchmarks/records.py [--samples 512] [--tokens 1024]

Prints a table of sizes and times in Markdown. The values are made up; log-probs are random, so they
compress no better than real ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reinforce_rl.monitoring.records import (
    RolloutRow,
    Samples,
    TokenColumns,
    read_rows,
    read_tokens,
    write_records,
)

VOCABULARY = 50_000
PROMPT = 200
GROUP = 4


def made_up(samples: int, tokens: int, *, with_tokens: bool) -> Samples:
    draw = np.random.default_rng(0)
    texts = {i: f" w{i:x}" for i in range(VOCABULARY)}
    lengths = draw.integers(tokens // 2, tokens + 1, samples)
    # Word frequencies as in a language.
    ids = draw.zipf(1.3, lengths.sum()) % VOCABULARY
    ids = ids.astype(np.int32)
    num_prompts = math.ceil(samples / GROUP)
    distinct = draw.integers(0, VOCABULARY, (num_prompts, PROMPT))
    prompts = np.repeat(distinct, GROUP, axis=0)[:samples]

    def text_of(part: np.ndarray) -> str:
        return "".join(texts[token] for token in part.tolist())

    rows = []
    start = 0
    for i, length in enumerate(lengths.tolist()):
        response = ids[start : start + length]
        start += length
        reward, kl, with_kl, baseline, advantage = draw.normal(size=5).tolist()
        row = RolloutRow(
            1,
            i // GROUP,
            i % GROUP,
            text_of(prompts[i]),
            text_of(response),
            reward,
            "stop",
            length,
            kl,
            with_kl,
            baseline,
            advantage,
        )
        rows.append(row)
    if not with_tokens:
        return Samples(rows, None)
    policy = -draw.exponential(0.8, len(ids)).astype(np.float32)
    reference = policy + draw.normal(0, 0.02, len(ids)).astype(np.float32)
    generator = policy + draw.normal(0, 0.003, len(ids)).astype(np.float32)
    values = {
        "prompt_tokens": prompts.reshape(-1).astype(np.int32),
        "response_tokens": ids,
        "token_kl": policy - reference,
        "policy_log_probs": policy,
        "reference_log_probs": reference,
        "generator_log_probs": generator,
    }
    counts = {"prompt": np.full(samples, PROMPT), "response": lengths}
    return Samples(rows, TokenColumns(counts, values, texts))


def as_lines(path: Path, samples: Samples) -> bytes:
    """The content of a written file as JSON lines."""
    tokens = read_tokens(path) or [None] * len(samples.rows)
    lines = []
    for row, row_tokens in zip(samples.rows, tokens, strict=True):
        record = row.as_json()
        if row_tokens:
            record |= row_tokens.as_json()
        lines.append(json.dumps(record))
    return "\n".join(lines).encode()


def timed(work: Callable[[], object]) -> float:
    """CPU seconds, the least of five times."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


@dataclass(frozen=True)
class Cost:
    """Of a form of the record."""

    size: int  # bytes
    write: float  # seconds
    read: float


def measure(samples: Samples, folder: Path) -> dict[str, Cost]:
    path = folder / "step_00001.parquet"

    def read_parquet() -> None:
        read_rows(path)
        read_tokens(path)

    write = timed(lambda: write_records(path, samples))
    read = timed(read_parquet)
    costs = {"Parquet, zstd": Cost(path.stat().st_size, write, read)}
    lines = as_lines(path, samples)
    objects = [json.loads(line) for line in lines.split(b"\n")]
    dumping = timed(lambda: [json.dumps(record) for record in objects])
    parsing = timed(lambda: [json.loads(line) for line in lines.split(b"\n")])
    gzipped = gzip.compress(lines, 6)
    write = timed(lambda: gzip.compress(lines, 6))
    read = timed(lambda: gzip.decompress(gzipped))
    costs["JSON lines, gzip"] = Cost(len(gzipped), dumping + write, parsing + read)
    codec = pa.Codec("zstd", compression_level=3)
    packed = codec.compress(lines)
    write = timed(lambda: codec.compress(lines))
    read = timed(lambda: codec.decompress(packed, len(lines)))
    costs["JSON lines, zstd"] = Cost(len(packed), dumping + write, parsing + read)
    costs["JSON lines"] = Cost(len(lines), dumping, parsing)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="of the longest response")
    args = parser.parse_args()
    print("| form | MB | write, s | read, s |\n|---|---|---|---|")
    for name, with_tokens in (("all", True), ("without tokens", False)):
        samples = made_up(args.samples, args.tokens, with_tokens=with_tokens)
        with tempfile.TemporaryDirectory() as folder:
            costs = measure(samples, Path(folder))
        for form, cost in costs.items():
            megabytes = cost.size / 1e6
            print(f"| {form}, {name} | {megabytes:.3f} | {cost.write:.3f} | {cost.read:.3f} |")


if __name__ == "__main__":
    main()
