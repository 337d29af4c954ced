"""Size and time of a step's record: Parquet as it is written, against compressed JSON lines of the same content.

python benchmarks/records.py [--samples 512] [--tokens 1024]: a table in Markdown. The values are made up; log-probs
are drawn, so they compress no better than real ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
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
    # words as often as in a language
    ids = (draw.zipf(1.3, lengths.sum()) % VOCABULARY).astype(np.int32)
    prompts = np.repeat(
        draw.integers(0, VOCABULARY, (-(-samples // GROUP), PROMPT)), GROUP, axis=0
    )[:samples]
    rows = []
    end = 0
    for i, length in enumerate(lengths.tolist()):
        start = end
        end = end + length
        prompt, response = (
            "".join(map(texts.__getitem__, part.tolist())) for part in (prompts[i], ids[start:end])
        )
        reward, kl, with_kl, baseline, advantage = draw.normal(size=5).tolist()
        rows.append(
            RolloutRow(
                *(1, i // GROUP, i % GROUP, prompt, response, reward, "stop", length),
                *(kl, with_kl, baseline, advantage),
            )
        )
    policy = -draw.exponential(0.8, len(ids)).astype(np.float32)
    reference, generator = (
        policy + draw.normal(0, by, len(ids)).astype(np.float32) for by in (0.02, 0.003)
    )
    values = {
        "prompt_tokens": prompts.reshape(-1).astype(np.int32),
        "response_tokens": ids,
        "token_kl": policy - reference,
    }
    values |= {
        "policy_log_probs": policy,
        "reference_log_probs": reference,
        "generator_log_probs": generator,
    }
    of_each = TokenColumns({"prompt": np.full(samples, PROMPT), "response": lengths}, values, texts)
    return Samples(rows, of_each if with_tokens else None)


def as_lines(path: Path, samples: Samples) -> bytes:
    """The content of a written file as JSON lines."""
    tokens = read_tokens(path) or [None] * len(samples.rows)
    lines = [
        row.as_json() | (found.as_json() if found else {})
        for row, found in zip(samples.rows, tokens, strict=True)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def timed(work: Callable[[], object]) -> float:
    found = []
    for _ in range(5):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def measure(samples: Samples, folder: Path) -> dict[str, tuple[float, float, float]]:
    """Megabytes, seconds to write and seconds to read of each form."""
    path = folder / "step_00001.parquet"
    write = timed(lambda: write_records(path, samples))
    read = timed(lambda: (read_rows(path), read_tokens(path)))
    found = {"Parquet, zstd": (path.stat().st_size / 1e6, write, read)}
    lines, codec = as_lines(path, samples), pa.Codec("zstd", compression_level=3)
    objects = [json.loads(line) for line in lines.split(b"\n")]
    dumping = timed(lambda: [json.dumps(one) for one in objects])
    parsing = timed(lambda: list(map(json.loads, lines.split(b"\n"))))
    packed = gzip.compress(lines, 6)
    times = timed(lambda: gzip.compress(lines, 6)), timed(lambda: gzip.decompress(packed))
    found["JSON lines, gzip"] = len(packed) / 1e6, dumping + times[0], parsing + times[1]
    packed = codec.compress(lines)
    times = (
        timed(lambda: codec.compress(lines)),
        timed(lambda: codec.decompress(packed, len(lines))),
    )
    found["JSON lines, zstd"] = len(packed) / 1e6, dumping + times[0], parsing + times[1]
    found["JSON lines"] = len(lines) / 1e6, dumping, parsing
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="of the longest response")
    asked = parser.parse_args()
    print("| form | MB | write, s | read, s |\n|---|---|---|---|")
    for name, with_tokens in (("all", True), ("without tokens", False)):
        samples = made_up(asked.samples, asked.tokens, with_tokens=with_tokens)
        with tempfile.TemporaryDirectory() as folder:
            for form, (size, write, read) in measure(samples, Path(folder)).items():
                print(f"| {form}, {name} | {size:.3f} | {write:.3f} | {read:.3f} |")


if __name__ == "__main__":
    main()
