"""What a reward source gets: texts without the token that ended them, and the prompt's fields."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.rewards import FunctionReward
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import Completions, Prompt, RolloutBatch
from reinforce_rl.data.prompts import PromptDataset
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.rewards.base import (
    STATUS_INTERNAL,
    STATUS_NOT_FINITE,
    STATUS_OK,
    STATUS_TIMED_OUT,
    RewardRequest,
    Rewards,
)
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.scoring import faults_of, request_about, scores_of, with_valid
from reinforce_rl.rollout.source import RolloutContext
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.console import warn_once

MESSAGES = ({"role": "user", "content": "tea"},)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), 48))


class Asked(FunctionReward):
    def __init__(self):
        super().__init__(lambda ids: 0.0, 0)
        self.requests: list[RewardRequest] = []

    def infer_rm(self, request: RewardRequest):
        self.requests.append(request)
        return super().infer_rm(request)


def test_the_texts_of_a_request_are_those_that_the_tokens_spell(tmp_path):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    tokenizer.clean_up_tokenization_spaces = True  # as Llama 3's folder says
    text = "if x != y : f ( ' a ' ) ."
    beyond = len(tokenizer)  # between the tokenizer's size and the model's
    tokens = torch.tensor([[*tokenizer(text)["input_ids"], beyond]])
    completions = Completions(tokens, torch.tensor([tokens.shape[1]]), ("length",))
    request = request_about([Prompt(0, "p", (5,))], completions, tokenizer, [2])
    assert request.responses == (text,)
    assert request.tokens.tolist() == [[5, *tokens[0].tolist()]]


def test_what_a_template_opens_for_the_model_is_in_the_prompt(tmp_path):
    """Some templates write `<think>`, and their models do not.

    Examples are DeepSeek's distilled models and Qwen3.5.
    """
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    opened = "{% if add_generation_prompt %}A: <think>\n{% endif %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + opened
    )
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    prompt = PromptDataset.from_files(tokenizer, tmp_path / "a.jsonl", max_prompt_tokens=None)[0]
    tokens = torch.tensor([[*tokenizer("a</think>b")["input_ids"], 2]])
    completions = Completions(tokens, torch.tensor([tokens.shape[1]]), ("stop",))
    (sample,) = request_about([prompt], completions, tokenizer, [2]).samples
    assert sample.prompt == "user: hi\nA: <think>\n"
    assert sample.response == "a</think>b"


def test_special_tokens_of_a_response_are_kept_where_a_reward_reads_them(tmp_path, caplog):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = tokenizer("<think>a</think>b<eos>")["input_ids"]
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    completions = Completions(torch.tensor([ids]), torch.tensor([5]), ("stop",))
    prompts = [Prompt(0, "p", (5,))]
    ask = partial(request_about, prompts, completions, tokenizer, [2])
    warn_once.cache_clear()
    assert ask(skip_special_tokens=False).responses == ("<think>a</think>b",)
    assert not caplog.messages
    for _ in range(2):
        assert ask(skip_special_tokens=True).responses == ("ab",)
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert "token <think>," in message or "token </think>," in message
        assert "model.reinforce.skip_special_tokens=false" in message


def test_a_request_has_texts_fields_and_what_was_cut(tokenizer):
    dot = tokenizer.convert_tokens_to_ids(".")  # ends a response here, and is no special token
    texts = ["ab.", "ab.a", ".", "", "ab", "a<eos>"]
    finish_reasons = ("stop", "length", "stop", "length", "stop", "stop")
    tokens = torch.zeros((6, 4), dtype=torch.long)
    lengths = torch.zeros(6, dtype=torch.long)
    for row, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        lengths[row] = len(ids)
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    completions = Completions(tokens, lengths, finish_reasons)
    mesh = SimpleNamespace(
        is_model_parallel_rank_0=True,
        dp_size=1,
        world_size=1,
        any_rank=bool,
        raise_if_any=lambda failure: None,
        raise_on_all_ranks=contextlib.nullcontext,
    )
    reinforce = SimpleNamespace(skip_special_tokens=True)
    model: Any = SimpleNamespace(
        tokenizer=tokenizer,
        pad_id=0,
        mesh=mesh,
        generator=SimpleNamespace(awake=contextlib.nullcontext),
        settings=SimpleNamespace(seed=0, reinforce=reinforce),
        sampling=SimpleNamespace(stop_token_ids=(2, dot)),
        infer=lambda *_, **__: completions,
    )
    prompts = [
        Prompt(0, "plain", (5,), {"answer": "1"}),
        Prompt(1, "U: tea<eos>A:", (6, 7), {}, MESSAGES),
    ]
    rm = Asked()
    loader: Any = None
    context = RolloutContext(
        ReinforceConfig(), model, rm, lambda prompts, _: [prompts], loader, loader, StopRequest()
    )
    LocalRollouts(context).sample(prompts, 3, step=1)
    samples = rm.requests[0].samples
    responses = [sample.response for sample in samples]
    assert responses == ["ab", "ab.a", "", "", "ab", "a"]
    finished = [sample.finished for sample in samples]
    assert finished == [True, False, True, False, True, True]
    messages = [sample.messages for sample in samples]
    assert messages == [()] * 3 + [MESSAGES] * 3
    records = [sample.record for sample in samples]
    assert records == [{"answer": "1"}] * 3 + [{}] * 3
    # The request has all tokens: the prompts have 1 and 2, the responses 3, 4, 1, 0, 2 and 2.
    assert rm.requests[0].lengths.tolist() == [4, 5, 2, 2, 4, 4]


class Scored:
    """A future that is done."""

    def __init__(self, values: list[float], status: list[int]):
        self.rewards = Rewards(torch.tensor(values), torch.tensor(status, dtype=torch.int32))

    def result(self) -> Rewards:
        return self.rewards


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_a_failed_one(value):
    scores = scores_of(Scored([1.0, value], [STATUS_OK, STATUS_OK]), 2)
    assert scores.status.tolist() == [STATUS_OK, STATUS_NOT_FINITE]
    assert scores.values[0] == 1.0
    assert scores.values[1].isnan()


def test_a_failed_sample_has_no_score_whatever_number_came_with_it():
    scores = scores_of(Scored([0.0, 2.0, 3.0], [STATUS_TIMED_OUT, STATUS_OK, STATUS_INTERNAL]), 3)
    assert scores.values.isnan().tolist() == [True, False, True]
    assert scores.status.tolist() == [STATUS_TIMED_OUT, STATUS_OK, STATUS_INTERNAL]
    is_scored = [fault is None for fault in faults_of(scores)]
    assert is_scored == [False, True, False]


@pytest.mark.parametrize(
    ("option", "expected"),
    [("keep", [True, True, False, False, False]), ("drop", [True, False, False, False, False])],
)
def test_which_samples_are_valid(option, expected):
    """Complete, cut, empty, without a score, and with a token outside of the vocabulary."""
    batch = RolloutBatch(
        sequences=torch.zeros(5, 4, dtype=torch.long),
        prompt_lengths=torch.ones(5, dtype=torch.long),
        response_lengths=torch.tensor([2, 3, 0, 2, 1]),
        group_ids=torch.arange(5),
        sample_ids=torch.zeros(5, dtype=torch.long),
        finish_reasons=("stop", "length", "stop", "stop", "outside_vocabulary"),
        rewards=torch.tensor([1.0, 1.0, 1.0, math.nan, 1.0]),
        valid=torch.zeros(5, dtype=torch.bool),
    )
    assert with_valid(batch, option).valid.tolist() == expected
