"""Print the share of time that the engine waits for environments, in rounds and continuously.

python benchmarks/episodes.py                                     (two minutes; a tiny model)
python benchmarks/episodes.py --spread 0.5 --mean 2               (other delays)
python benchmarks/episodes.py --model FOLDER --step-seconds 0     (a real model's own time)

The native engine plays episodes of four answers with an environment whose replies take times of a
log-normal distribution; their mean is `--mean` times the time that the engine takes for an answer
of a full batch, which is measured first. 32 episodes are under way at a time: those of the cache,
or a batch of the rounds. A pass of the model sleeps, so that its time does not depend on what else
this machine does. "idle" is the time in which the engine can do nothing but wait for a reply.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.models import tiny_llama_folder

from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.generation.responses import converse_in_rounds
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import HFFolder, load_hf_weights
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.rewards.environment_pool import EnvironmentPool, Turn
from reinforce_rl.rollout.episodes import EpisodeGenerator

UNDER_WAY = 32
TURNS = 4
ROOM = 320  # tokens of an episode


class TimedPool(EnvironmentPool):
    """Measures the time in which its caller waits."""

    waited = 0.0

    def replies(self, seconds: float) -> list[Turn]:
        begun = time.monotonic()
        turns = super().replies(seconds)
        if seconds:
            self.waited += time.monotonic() - begun
        return turns


class InRounds(NativeGenerator):
    """Plays 32 episodes at a time, in rounds."""

    def converse(self, responses: Any, params: SamplingParams, partner: Any) -> None:
        for first in range(0, len(responses), UNDER_WAY):

            def numbered(answers: Any, *, waits: bool, first: int = first) -> Any:
                moved = {first + row: answer for row, answer in answers.items()}
                turns = partner(moved, waits=waits)
                return {row - first: turn for row, turn in turns.items()}

            converse_in_rounds(self, responses[first : first + UNDER_WAY], params, numbered)


@contextlib.contextmanager
def slow_passes(lm: CausalLM, seconds: float) -> Iterator[None]:
    hook = lm.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        hook.remove()


def prompts_of(renderer: ChatRenderer, count: int) -> list[Prompt]:
    words = random.Random(0).choices(["apple", "pear", "plum", "fig", "lemon"], k=count)
    prompts = []
    for number, word in enumerate(words):
        messages = ({"role": "user", "content": f"{word}s?"},)
        tokens = tuple(renderer.prompt(Conversation(messages)))
        prompts.append(Prompt(number, "", tokens, {"word": word}, messages))
    return prompts


def play(
    generator: NativeGenerator,
    renderer: ChatRenderer,
    mesh: Mesh,
    params: SamplingParams,
    prompts: list[Prompt],
    delays: dict[str, float],
) -> tuple[Completions, float, float]:
    """Return the episodes, the seconds of all and the seconds in which the engine waited."""
    config = EnvironmentConfig(
        name="helpers.environment_functions.slow_reply",
        kwargs=delays,
        num_workers=UNDER_WAY,
        turn_timeout_seconds=600,
    )
    with contextlib.closing(TimedPool(config)) as pool:
        pool.start()
        episodes = EpisodeGenerator(
            generator,
            pool,
            renderer,
            mesh,
            vocab_size=renderer.tokenizer.vocab_size,
            max_turns=TURNS,
            max_tokens=ROOM,
            is_continuous=True,
        )
        begun = time.monotonic()
        completions = episodes.generate(prompts, 1, params, seed=1)
        return completions, time.monotonic() - begun, pool.waited


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder; none: a tiny Llama")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="sleep of a pass")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--mean", type=float, default=1.0, help="of the delay, in answers' times")
    parser.add_argument("--spread", type=float, default=1.0, help="sigma of the delay's logarithm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, parallel_mesh(1, 1) as mesh, torch.no_grad():
        model = args.model or tiny_llama_folder(folder, vocab_size=128, max_positions=512)
        lm = CausalLM(Architecture.from_folder(model), mesh, torch.float32)
        load_hf_weights(lm, HFFolder(model))
        renderer = ChatRenderer(load_tokenizer(model))
        prompts = prompts_of(renderer, args.episodes)
        # Every other token ends an answer that is long enough.
        ends = tuple(range(0, renderer.tokenizer.vocab_size, 2))
        params = SamplingParams(
            max_length=args.tokens + 12, min_length=args.tokens - 1, stop_token_ids=ends
        )
        longest = max(len(prompt.tokens) for prompt in prompts)
        cache_tokens = UNDER_WAY * (ROOM + longest)
        with slow_passes(lm, args.step_seconds):
            begun = time.monotonic()
            NativeGenerator(lm, renderer.tokenizer).generate(prompts[:UNDER_WAY], 1, params, 0)
            seconds = time.monotonic() - begun
            mean = args.mean * seconds
            median = mean / math.exp(args.spread**2 / 2)
            delays = {"median": median, "spread": args.spread}
            table = Table("episodes", "seconds", "engine idle", "answers a second")
            rows = []
            for name, kind in (("in rounds", InRounds), ("continuous", NativeGenerator)):
                generator = kind(lm, renderer.tokenizer, cache_tokens)
                played, total, waited = play(generator, renderer, mesh, params, prompts, delays)
                rows.append(played)
                share = f"{100 * waited / total:.0f} %"
                rate = f"{args.episodes * TURNS / total:.1f}"
                table.add_row(name, f"{total:.1f}", share, rate)
    console = Console()
    console.print(f"load of this machine: {os.getloadavg()[0]:.1f}")
    console.print(
        f"{args.episodes} episodes of {TURNS} answers of {args.tokens} tokens; an answer takes "
        f"{seconds:.2f} s, a reply {mean:.2f} s in the mean"
    )
    console.print(table)
    in_rounds, continuous = (replace(played, log_probs=None) for played in rows)
    assert torch.equal(in_rounds.tokens, continuous.tokens), "the episodes differ"


if __name__ == "__main__":
    main()
