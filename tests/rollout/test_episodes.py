"""Episodes: rows are what the engine saw, masks say who wrote what, faults are left out."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat_templates import (
    CONTROL_TOKENS,
    HARMONY,
    LAST_IS_MARKED,
    LLAMA3,
    MISTRAL_TOOLS,
    QWEN3,
    QWEN25,
    TOOL_TOKENS,
    write_chat_tokenizer,
)
from helpers.layouts import ALL_LAYOUTS
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model
from helpers.ranks import call_on_ranks, one_group
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_OUTSIDE, FINISH_STOP
from reinforce_rl.data.rendering import ChatRenderer, TemplateOptions
from reinforce_rl.data.tokenizer import decode_all, load_tokenizer
from reinforce_rl.generation.base import PartialResponse, SamplingParams, WeightUpdates
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.metrics import turns_of
from reinforce_rl.rewards.environment_pool import EnvironmentPool, Turn
from reinforce_rl.rollout.episodes import EpisodeGenerator
from reinforce_rl.rollout.scoring import request_about, unscored_batch

EOS = 2
PARAMS = SamplingParams(max_length=6, stop_token_ids=(EOS,))
ENVIRONMENTS = "helpers.environment_functions"


class Scripted:
    """A generator whose answers are texts of a function of (prompt id, turn), ended by a token.

    It keeps the histories that it was given.
    """

    is_exact = True

    def __init__(self, renderer: ChatRenderer, answer: Callable[[int, int], str], end: int = EOS):
        self._renderer = renderer
        self._answer = answer
        self._end = end
        self.histories: dict[int, list[tuple[int, ...]]] = {}
        self.keys: list[int] = []

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        answered = []
        for response in responses:
            histories = self.histories.setdefault(response.prompt.id, [])
            histories.append(response.prompt.tokens)
            self.keys.append(response.key)
            text = self._answer(response.prompt.id, len(histories))
            tokens = [*self._renderer.encode(text), self._end][: response.max_length(params)]
            reason = FINISH_STOP if tokens[-1] == self._end else FINISH_LENGTH
            log_probs = tuple(-0.5 - number for number in range(len(tokens)))
            answered.append(
                replace(response, tokens=tuple(tokens), log_probs=log_probs, finish_reason=reason)
            )
        return answered


@contextlib.contextmanager
def episodes_of(
    generator: Any, renderer: ChatRenderer, mesh: Any, environment: str, **settings: Any
) -> Iterator[EpisodeGenerator]:
    sizes = {"max_turns": 4, "max_tokens": 200, "vocab_size": 128, **settings}
    config = EnvironmentConfig(name=f"{ENVIRONMENTS}.{environment}", num_workers=8)
    with contextlib.closing(EnvironmentPool(config)) as pool:
        yield EpisodeGenerator(generator, pool, renderer, mesh, **sizes)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def chat_prompt(renderer: ChatRenderer, number: int, text: str = "hi", **record: Any) -> Prompt:
    messages = ({"role": "user", "content": text},)
    tokens = tuple(renderer.prompt(Conversation(messages)))
    return Prompt(number, "", tokens, record, messages)


def row_of(completions: Completions, row: int) -> list[int]:
    return completions.tokens[row, : completions.lengths[row]].tolist()


def own_tokens(completions: Completions, row: int) -> list[int]:
    """The tokens of a row that the policy wrote."""
    assert completions.policy_mask is not None
    return completions.tokens[row][completions.policy_mask[row]].tolist()


def test_a_row_is_the_rendered_conversation(renderer, mesh):
    """The tokenizer knows single characters, so the template's text has one tokenisation."""
    generator = Scripted(renderer, lambda prompt, turn: "ab" if turn == 1 else "abc")
    prompts = [chat_prompt(renderer, number, word="go") for number in (4, 5)]
    with episodes_of(generator, renderer, mesh, "odd_letters") as episodes:
        completions = episodes.generate(prompts, 1, PARAMS, seed=1)
    assert completions.environment_faults == (None, None)
    assert completions.finish_reasons == (FINISH_STOP, FINISH_STOP)
    assert completions.environment_rewards is not None
    assert completions.environment_rewards.tolist() == [0.5 + 0.0] * 2
    assert completions.turn_rewards is not None
    for row in completions.turn_rewards.tolist():
        # at the end token of the first answer
        assert row == [0.0, 0.0, 0.5] + [0.0] * (len(row) - 3)
    for row, prompt in enumerate(prompts):
        whole = [*prompt.tokens, *row_of(completions, row)]
        text = renderer.tokenizer.decode(whole)
        assert text.startswith("U: hi<eos>A:ab<eos>U: go ")
        assert text.endswith("<eos>A:abc<eos>")
        assert own_tokens(completions, row) == [
            *(*renderer.encode("ab"), EOS),
            *(*renderer.encode("abc"), EOS),
        ]
        # the second answer continued exactly the first part of the row
        first, second = generator.histories[prompt.id]
        assert first == prompt.tokens
        assert list(second) == whole[: len(second)]
        assert completions.log_probs is not None and completions.policy_mask is not None
        assert bool((completions.log_probs[row][~completions.policy_mask[row]] == 0).all())
    batch = unscored_batch(prompts, completions, pad_id=0)
    assert turns_of(batch).tolist() == [2, 2]
    assert len(set(generator.keys)) == 4


def test_the_token_that_ends_an_answer_is_no_part_of_its_text(renderer, mesh):
    """Also where the tokenizer does not take it for a special one."""
    (end,) = renderer.encode("z")
    generator = Scripted(renderer, lambda prompt, turn: "ab" if turn == 1 else "abc", end)
    params = replace(PARAMS, stop_token_ids=(end,))
    prompts = [chat_prompt(renderer, 0)]
    with episodes_of(generator, renderer, mesh, "odd_letters") as episodes:
        completions = episodes.generate(prompts, 1, params, seed=1)
    assert turns_of(unscored_batch(prompts, completions, pad_id=0)).tolist() == [2]
    assert completions.environment_rewards is not None
    assert completions.environment_rewards.tolist() == [0.5 + 0.0]  # of 2 letters, and of 3


def test_the_environment_draws_by_prompt_and_sample(renderer, mesh):
    prompts = [chat_prompt(renderer, number) for number in range(4)]

    def rows(order: list[Prompt]) -> dict[int, list[list[int]]]:
        generator = Scripted(renderer, lambda prompt, turn: "ab")
        with episodes_of(generator, renderer, mesh, "odd_letters") as episodes:
            completions = episodes.generate(order, 2, PARAMS, seed=1)
        rows = [row_of(completions, row) for row in range(2 * len(order))]
        return {prompt.id: rows[2 * i : 2 * i + 2] for i, prompt in enumerate(order)}

    in_order = rows(prompts)
    assert rows(prompts[::-1]) == in_order
    assert rows(prompts[:1])[0] == in_order[0]
    assert len({str(row) for pair in in_order.values() for row in pair}) == 8


@pytest.mark.parametrize(
    ("settings", "params", "reason", "answers"),
    [
        ({"max_turns": 3}, PARAMS, FINISH_STOP, 3),
        # an answer has 3 tokens, and the environment writes 10
        ({"max_tokens": 26}, PARAMS, FINISH_LENGTH, 2),
        ({"max_tokens": 28}, PARAMS, FINISH_LENGTH, 3),
        ({}, replace(PARAMS, max_length=2), FINISH_LENGTH, 1),
    ],
    ids=["turns", "no room for an answer", "no room for all of it", "answer cut"],
)
def test_where_an_episode_ends(settings, params, reason, answers, renderer, mesh):
    generator = Scripted(renderer, lambda prompt, turn: "ab")
    with episodes_of(generator, renderer, mesh, "odd_letters", **settings) as episodes:
        completions = episodes.generate([chat_prompt(renderer, 0)], 1, params, seed=1)
    assert completions.finish_reasons == (reason,)
    batch = unscored_batch([chat_prompt(renderer, 0)], completions, pad_id=0)
    assert turns_of(batch).tolist() == [answers]
    assert completions.policy_mask is not None
    assert bool(completions.policy_mask[0, -1])  # nothing behind the last answer
    assert int(completions.lengths[0]) <= settings.get("max_tokens", 200)


def test_failures_of_the_environment_are_left_out(renderer, mesh):
    prompts = [chat_prompt(renderer, 0, fails=False), chat_prompt(renderer, 1, fails=True)]
    generator = Scripted(renderer, lambda prompt, turn: "ab")
    with episodes_of(generator, renderer, mesh, "FailsAtTheSecond") as episodes:
        completions = episodes.generate(prompts, 1, PARAMS, seed=1)
    rewards = completions.environment_rewards
    assert rewards is not None
    assert rewards[0] == 2.0
    assert rewards.isnan().tolist() == [False, True]
    fine, failed = completions.environment_faults
    assert fine is None
    assert failed is not None
    assert failed.startswith("the environment failed: KeyError")
    assert "no table" in failed


def test_a_template_that_drops_thoughts_begins_a_context(tmp_path, mesh):
    """The answer behind a dropped thought continues the template's rendering, tokenised once."""
    renderer = ChatRenderer(
        write_chat_tokenizer(tmp_path, QWEN3), TemplateOptions(kwargs={"enable_thinking": True})
    )
    (end,) = renderer.encode("<|im_end|>")
    params = SamplingParams(max_length=60, stop_token_ids=(end,))
    prompt = chat_prompt(renderer, 0, word="go")

    def play(texts: Sequence[str], max_tokens: int = 300) -> tuple[Scripted, Completions]:
        generator = Scripted(renderer, lambda prompt, turn: texts[turn - 1], end)
        sizes = {"vocab_size": 1000, "max_tokens": max_tokens}
        with episodes_of(generator, renderer, mesh, "odd_letters", **sizes) as episodes:
            completions = episodes.generate([prompt], 1, params, seed=1)
        assert completions.environment_faults == (None,)
        return generator, completions

    _, plain = play(["ab", "abc"])
    assert plain.history_mask is not None and not plain.history_mask.any()

    thought = "<think>hm</think>a"
    answers = [thought, "ab", "abc"]
    generator, completions = play(answers)
    histories = [list(tokens) for tokens in generator.histories[0]]
    assert histories[0] == list(prompt.tokens)
    text = renderer.tokenizer.decode(histories[1])
    assert "hm" not in text
    (reply,) = re.findall(r"user\n(go \d)", text)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": reply},
    ]
    assert histories[1] == renderer.prompt(Conversation(tuple(messages)))
    # what follows has nothing to drop
    ended = [*renderer.encode("ab"), end]
    assert histories[2][: len(histories[1]) + len(ended)] == histories[1] + ended

    row = row_of(completions, 0)
    first = [*renderer.encode(thought), end]
    assert row[: len(first)] == first
    second = row[len(first) :]
    assert second[: len(histories[2])] == histories[2]
    assert second[len(histories[2]) :] == [*renderer.encode("abc"), end]
    assert own_tokens(completions, 0) == [*first, *ended, *renderer.encode("abc"), end]
    assert completions.history_mask is not None and completions.policy_mask is not None
    is_history = completions.history_mask[0]
    assert not (is_history & completions.policy_mask[0]).any()
    (places,) = is_history.nonzero(as_tuple=True)
    assert places.tolist() == list(range(len(first), int(places[-1]) + 1))
    # A reward source reads every message once.
    request = request_about([prompt], completions, renderer.tokenizer, (end,))
    expected = f"{thought}\nuser\n{reply}\nassistant\nab\nuser\n"
    assert request.responses[0].startswith(expected)
    batch = unscored_batch([prompt], completions, pad_id=0)
    assert turns_of(batch).tolist() == [3]
    # The rewritten history takes the episode's room too.
    size = len(first) + len(histories[1])
    _, cut = play(answers, max_tokens=size)
    assert row_of(cut, 0) == first
    assert cut.finish_reasons == (FINISH_LENGTH,)
    _, longer = play(answers, max_tokens=size + 2)
    assert row_of(longer, 0) == [*first, *histories[1], *renderer.encode("ab")]


def test_a_token_outside_the_vocabulary_ends_the_episode(renderer, mesh):
    generator = Scripted(renderer, lambda prompt, turn: "ab", end=900)
    with episodes_of(generator, renderer, mesh, "odd_letters") as episodes:
        completions = episodes.generate([chat_prompt(renderer, 0)], 1, PARAMS, seed=1)
    assert completions.finish_reasons == (FINISH_OUTSIDE,)


CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "subtract", "arguments": {}}\n</tool_call>'
)


def test_tool_calls_are_run(tmp_path, mesh):
    """The row has the policy's own text of the calls, and messages with ids that are keyed."""
    renderer = ChatRenderer(write_chat_tokenizer(tmp_path, QWEN25))
    (end,) = renderer.encode("<|im_end|>")
    params = SamplingParams(max_length=200, stop_token_ids=(end,))
    prompts = [chat_prompt(renderer, number) for number in range(2)]

    def play() -> Completions:
        generator = Scripted(renderer, lambda prompt, turn: CALLS if turn == 1 else "abc", end)
        sizes = {"vocab_size": 1000, "max_tokens": 1000}
        with episodes_of(generator, renderer, mesh, "TwoTools", **sizes) as episodes:
            return episodes.generate(prompts, 1, params, seed=1)

    completions = play()
    assert completions.environment_faults == (None, None)
    assert completions.environment_rewards is not None
    assert completions.environment_rewards.tolist() == [1.0, 1.0]
    text = renderer.tokenizer.decode(row_of(completions, 0))
    assert text == (
        f"{CALLS}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nThere is no tool 'subtract'; there are add, word.\n"
        "</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nabc<|im_end|>"
    )
    assert own_tokens(completions, 0) == [
        *(*renderer.encode(CALLS), end),
        *(*renderer.encode("abc"), end),
    ]
    assert play().tokens.tolist() == completions.tokens.tolist()


def test_ids_of_calls_are_keyed_by_sample_and_turn(tmp_path, mesh):
    tokens = (*CONTROL_TOKENS, *TOOL_TOKENS)
    tokenizer = write_chat_tokenizer(tmp_path, MISTRAL_TOOLS, control_tokens=tokens)
    renderer = ChatRenderer(tokenizer)
    (end,) = renderer.encode("</s>")
    params = SamplingParams(max_length=200, stop_token_ids=(end,))
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]'

    def ids() -> list[list[str]]:
        # turns of both samples count, so each has two answers that call
        generator = Scripted(renderer, lambda prompt, turn: text if turn < 5 else "abc", end)
        sizes = {"vocab_size": 1000, "max_tokens": 1000}
        with episodes_of(generator, renderer, mesh, "TwoTools", **sizes) as episodes:
            completions = episodes.generate([chat_prompt(renderer, 0)], 2, params, seed=1)
        assert completions.environment_faults == (None, None)
        rows = decode_all(renderer.tokenizer, [row_of(completions, row) for row in range(2)])
        return [re.findall(r'\{"content": 5, "call_id": "(\w{9})"\}', row) for row in rows]

    first = ids()
    assert ids() == first
    assert len({*first[0], *first[1]}) == 4


def test_a_final_answer_is_graded_without_its_channels(tmp_path, mesh):
    tokens = (*CONTROL_TOKENS, *TOOL_TOKENS)
    renderer = ChatRenderer(write_chat_tokenizer(tmp_path, HARMONY, control_tokens=tokens))
    ends = tuple(renderer.encode("<|call|><|return|>"))
    params = SamplingParams(max_length=200, stop_token_ids=ends)
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>eeeee"
    )
    generator = Scripted(renderer, lambda prompt, turn: text, ends[1])
    sizes = {"vocab_size": 1000, "max_tokens": 1000}
    with episodes_of(generator, renderer, mesh, "TwoTools", **sizes) as episodes:
        completions = episodes.generate([chat_prompt(renderer, 0)], 1, params, seed=1)
    assert completions.environment_rewards is not None
    assert completions.environment_rewards.tolist() == [1 + 5 / 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama_folder(
        tmp_path_factory.mktemp("model"), vocab_size=128, max_positions=256, logit_scale=2.0
    )


def test_log_probs_are_those_of_the_whole_row(model, mesh):
    """Also for answers of later turns: the engine continued exactly these tokens."""
    lm = megatron_model(model, mesh, torch.float64)
    renderer = ChatRenderer(load_tokenizer(model))
    prompts = [chat_prompt(renderer, number, "hi" * number) for number in range(1, 4)]
    params = replace(PARAMS, max_length=9, stop_token_ids=tuple(range(2, 50)))
    native = NativeGenerator(lm, renderer.tokenizer, use_graphs=False)
    with episodes_of(native, renderer, mesh, "odd_letters") as episodes:
        completions = episodes.generate(prompts, 4, params, seed=2)
    batch = unscored_batch(prompts, completions, pad_id=0)
    assert turns_of(batch).max() > 1
    assert batch.generator_log_probs is not None
    for row in range(12):
        start = int(batch.prompt_lengths[row])
        end = start + int(batch.response_lengths[row])
        with torch.no_grad():
            hidden = lm(batch.sequences[row : row + 1, :end])
            logits = lm.full_logits(hidden[0])
        expected = torch.log_softmax(logits.double(), -1)[start - 1 : end - 1]
        of_tokens = expected.gather(1, batch.sequences[row, start:end, None])[:, 0]
        mask = batch.response_mask[row, : end - start]
        reported = batch.generator_log_probs[row, : end - start]
        assert reported[mask].tolist() == pytest.approx(of_tokens[mask].tolist(), abs=1e-5)


class RandomReplies:
    """Plays an environment's part in this process: replies at random, now and then the last one."""

    tools = None

    def __init__(self, draw: random.Random, roles: Sequence[str]):
        self._draw = draw
        self._roles = roles
        self._turns: list[Turn] = []

    def begin(self, episode: int, record: Any, **keys: int) -> None:
        pass

    def answer(self, episode: int, text: str, calls: object, faults: object) -> None:
        draw = self._draw
        if draw.random() < 0.3:
            self._turns.append(Turn(episode, is_end=True))
            return
        messages = []
        for _ in range(draw.choice((1, 1, 2))):
            content = "".join(draw.choices("abc {}\"'\n<>", k=draw.randint(1, 12))).strip() or "x"
            messages.append({"role": draw.choice(self._roles), "content": content})
        self._turns.append(Turn(episode, tuple(messages)))

    @property
    def under_way(self) -> int:
        return len(self._turns)

    def replies(self, seconds: float) -> list[Turn]:
        turns = self._turns
        self._turns = []
        return turns

    def end(self, episode: int) -> None:
        pass


class RandomAnswers:
    """A generator of random tokens, control tokens included, that keeps what it was given."""

    is_exact = True

    def __init__(self, draw: random.Random, vocab_size: int, end: int):
        self._draw = draw
        self._vocab_size = vocab_size
        self._end = end
        self.seen: dict[int, list[int]] = {}  # prompt and answers of each prompt's episode

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        answered = []
        for response in responses:
            draw = self._draw
            count = draw.randint(0, 6)
            drawn = [draw.randrange(3, self._vocab_size) for _ in range(count)]
            tokens = [*(token for token in drawn if token != self._end), self._end]
            before = self.seen.get(response.prompt.id, [])
            history = list(response.prompt.tokens)
            assert history[: len(before)] == before, "what the engine has seen is not changed"
            self.seen[response.prompt.id] = [*history, *tokens]
            answered.append(
                replace(
                    response,
                    tokens=tuple(tokens),
                    log_probs=(-1.0,) * len(tokens),
                    finish_reason=FINISH_STOP,
                )
            )
        return answered


@pytest.mark.parametrize(
    ("template", "end", "roles", "kwargs"),
    [
        pytest.param(LLAMA3, "<|eot_id|>", ("user", "tool"), {}, id="Llama 3"),
        pytest.param(QWEN25, "<|im_end|>", ("user", "tool"), {}, id="Qwen2.5"),
        pytest.param(
            *(QWEN3, "<|im_end|>", ("user",), {"enable_thinking": False}), id="Qwen3, no thoughts"
        ),
    ],
)
@pytest.mark.parametrize("count", [200, pytest.param(3400, marks=pytest.mark.more)])
def test_a_row_is_what_the_engine_saw(template, end, roles, kwargs, count, tmp_path, mesh):
    renderer = ChatRenderer(
        write_chat_tokenizer(tmp_path, template), TemplateOptions(kwargs=kwargs)
    )
    (end_id,) = renderer.encode(end)
    draw = random.Random(count)
    size = len(renderer.tokenizer)
    generator = RandomAnswers(draw, size, end_id)
    episodes = EpisodeGenerator(
        generator,  # type: ignore[arg-type]
        RandomReplies(draw, roles),  # type: ignore[arg-type]
        renderer,
        mesh,
        vocab_size=size,
        max_turns=5,
        max_tokens=400,
    )
    prompts = [chat_prompt(renderer, number) for number in range(count)]
    params = SamplingParams(max_length=9, stop_token_ids=(end_id,))
    completions = episodes.generate(prompts, 1, params, seed=0)
    faults = [fault for fault in completions.environment_faults if fault is not None]
    assert not faults, faults[0]
    for row, prompt in enumerate(prompts):
        assert [*prompt.tokens, *row_of(completions, row)] == generator.seen[prompt.id]
    assert completions.policy_mask is not None
    assert int((~completions.policy_mask).sum()) > count


# A mark behind the last message, or before all: a reply rewrites the answer before, or the prompt.
REWRITING = {
    "answers": LAST_IS_MARKED,
    "prompt": (
        "{{ messages | length }}{% for message in messages %}{{ message['role'][0] | upper }}: "
        "{{ message['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    ),
}


@pytest.mark.parametrize("rewritten", [None, *REWRITING])
@pytest.mark.parametrize("max_tokens", [None, 900])
def test_continuous_episodes_are_those_of_the_rounds(max_tokens, rewritten, model, mesh):
    """Replies take up to 30 ms, so that episodes overtake each other."""
    lm = megatron_model(model, mesh, torch.float64)
    tokenizer = load_tokenizer(model)
    if rewritten is not None:
        tokenizer.chat_template = REWRITING[rewritten]
    renderer = ChatRenderer(tokenizer)
    prompts = [
        chat_prompt(renderer, number, "hi" * number, fails=number == 3) for number in range(1, 5)
    ]
    params = replace(PARAMS, max_length=9, stop_token_ids=tuple(range(2, 50)))

    def played(environment: str, *, is_continuous: bool) -> Completions:
        native = NativeGenerator(lm, renderer.tokenizer, max_tokens)
        settings = {"is_continuous": is_continuous, "max_tokens": 100}
        with episodes_of(native, renderer, mesh, environment, **settings) as episodes:
            return episodes.generate(prompts, 3, params, seed=2)

    for environment in ("slow_odd_letters", "FailsAtTheSecond"):
        rounds = played(environment, is_continuous=False)
        mine = played(environment, is_continuous=True)
        assert torch.equal(mine.tokens, rounds.tokens)
        assert torch.equal(mine.lengths, rounds.lengths)
        assert mine.finish_reasons == rounds.finish_reasons
        assert mine.environment_faults == rounds.environment_faults
        assert mine.policy_mask is not None and rounds.policy_mask is not None
        assert torch.equal(mine.policy_mask, rounds.policy_mask)
        assert mine.history_mask is not None and rounds.history_mask is not None
        assert torch.equal(mine.history_mask, rounds.history_mask)
        assert bool(mine.history_mask.any()) == (rewritten is not None)
        assert mine.log_probs is not None and rounds.log_probs is not None
        torch.testing.assert_close(mine.log_probs, rounds.log_probs, atol=1e-6, rtol=0)
        assert mine.environment_rewards is not None and rounds.environment_rewards is not None
        torch.testing.assert_close(
            mine.environment_rewards, rounds.environment_rewards, equal_nan=True, atol=0, rtol=0
        )
        assert turns_of(unscored_batch(prompts, mine, pad_id=0)).max() > 1


def test_a_generator_that_cannot_converse_plays_in_rounds(renderer, mesh):
    def played(*, is_continuous: bool) -> list[int]:
        generator = Scripted(renderer, lambda prompt, turn: "ab")
        settings = {"is_continuous": is_continuous}
        with episodes_of(generator, renderer, mesh, "odd_letters", **settings) as episodes:
            return row_of(episodes.generate([chat_prompt(renderer, 0)], 1, PARAMS, seed=1), 0)

    assert played(is_continuous=True) == played(is_continuous=False)


def play_on_layouts(folder: Path, names: tuple[str, ...]) -> list[Completions]:
    """Play continuous episodes; their environment is on the first rank of each block."""
    results = []
    with one_group():
        for name in names:
            with ALL_LAYOUTS[name].mesh() as mesh:
                results.append(play_slowly(folder, mesh, is_continuous=True))
    return results


def play_slowly(folder: Path, mesh: Mesh, *, is_continuous: bool) -> Completions:
    lm = megatron_model(folder, mesh, torch.float64)
    renderer = ChatRenderer(load_tokenizer(folder))
    prompts = [chat_prompt(renderer, number, "hi" * number) for number in range(1, 4)]
    params = replace(PARAMS, max_length=9, stop_token_ids=tuple(range(2, 50)))
    native = NativeGenerator(lm, renderer.tokenizer)
    settings = {"is_continuous": is_continuous, "max_tokens": 60}
    with episodes_of(native, renderer, mesh, "slow_odd_letters", **settings) as episodes:
        return episodes.generate(prompts, 3, params, seed=2)


@pytest.mark.more
def test_continuous_episodes_on_layouts(model, mesh):
    expected = play_slowly(model, mesh, is_continuous=False)
    assert expected.log_probs is not None
    for of_rank in call_on_ranks(play_on_layouts, 2, model, ("TP2", "PP2", "CP2")):
        assert len(of_rank) == 3
        for mine in of_rank:
            assert torch.equal(mine.tokens, expected.tokens)
            assert mine.finish_reasons == expected.finish_reasons
            assert torch.equal(mine.environment_rewards, expected.environment_rewards)
            torch.testing.assert_close(mine.log_probs, expected.log_probs, atol=1e-6, rtol=0)
