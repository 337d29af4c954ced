"""A real PyTriton reward server with a toy model: `python serve_toy_scorer.py inference.port=N [--slow 0.5] ...`.

The score of a sequence is a weighted sum of its tokens, in their order. Some tokens make the model misbehave.
"""

from __future__ import annotations

import argparse
import logging
import struct
import sys
import tempfile
import time
from pathlib import Path

VOCAB_SIZE = 128
MAX_LENGTH = 32
TOKEN_NAN = 101  # the score is NaN
TOKEN_RAISE = 102  # the model raises
TOKEN_SLOW = 103  # the call takes --slow seconds


def toy_score(tokens: list[int]) -> float:
    """The score that the server must give: weighted by position, negated for odd lengths."""
    total = sum((position + 1) * token for position, token in enumerate(tokens)) / 100.0
    return -total if len(tokens) % 2 else total


def toy_scores(sequences: list[list[int]]) -> list[float]:
    """As `toy_score`, rounded to the float32 that travels."""
    return [struct.unpack("f", struct.pack("f", toy_score(sequence)))[0] for sequence in sequences]


class ToyScorer:
    """A scorer whose last bits depend on the size of the call, as those of a real model do."""

    max_length = MAX_LENGTH
    vocab_size = VOCAB_SIZE

    def __init__(self, slow: float, batch_noise: float):
        self._slow = slow
        self._batch_noise = batch_noise

    def score(self, sequences: list[list[int]]) -> list[float]:
        if any(TOKEN_RAISE in sequence for sequence in sequences):
            raise RuntimeError("the toy model was told to raise")
        if any(TOKEN_SLOW in sequence for sequence in sequences):
            time.sleep(self._slow)
        noise = self._batch_noise * len(sequences)
        return [
            float("nan") if TOKEN_NAN in sequence else toy_score(sequence) + noise
            for sequence in sequences
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "overrides", nargs="*", help="inference.KEY=VALUE, as the real script takes it"
    )
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--batch-noise", type=float, default=0.0)
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_intermixed_args()
    logging.basicConfig(
        level=args.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )

    from helpers.tiny_tokenizer import write_tiny_tokenizer
    from omegaconf import OmegaConf

    from reinforce_rl.config.load import read
    from reinforce_rl.config.rewards import InferenceConfig
    from reinforce_rl.data.tokenizer import load_tokenizer
    from reinforce_rl.errors import ReinforceError
    from reinforce_rl.reward_model.server.server import RewardServer

    given = OmegaConf.from_dotlist(["inference.max_batch_size=8", *args.overrides])
    inference, faults = read(InferenceConfig, given.inference, "inference.")
    assert faults == []
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder), vocab_size=VOCAB_SIZE)
        tokenizer = load_tokenizer(folder)
    try:
        RewardServer(ToyScorer(args.slow, args.batch_noise), tokenizer, inference).serve()
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
