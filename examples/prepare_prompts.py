"""Turn preference pairs or conversations into prompt-only train.jsonl and validation.jsonl.

Example:
    python examples/prepare_prompts.py hh_pairs.jsonl --output data/hh --max-turns 1 --num-validation 128
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reinforce_rl.data.prepare import PrepareOptions, prepare_prompts
from reinforce_rl.errors import ReinforceError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "inputs", nargs="+", type=Path, help="JSONL files with prompt, messages, or chosen and rejected"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for train.jsonl and validation.jsonl")
    parser.add_argument(
        "--form",
        choices=("messages", "prompt"),
        default="messages",
        help="messages: a list of turns; prompt: one string in the Human/Assistant form (default: messages)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--validation-fraction", type=float, default=0.1, help="share for validation (default: 0.1)")
    size.add_argument("--num-validation", type=int, help="number of prompts for validation")
    parser.add_argument("--seed", type=int, default=0, help="chooses the validation prompts (default: 0)")
    parser.add_argument("--max-turns", type=int, help="skip prompts with more user turns")
    parser.add_argument("--max-characters", type=int, help="skip prompts with more characters over all turns")
    parser.add_argument("--limit", type=int, help="keep so many prompts in all, drawn by the seed")
    values = vars(parser.parse_args())
    inputs, output = values.pop("inputs"), values.pop("output")
    try:
        counts = prepare_prompts(inputs, output, PrepareOptions(**values))
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(counts)
    print(f"written to {output / 'train.jsonl'} and {output / 'validation.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
