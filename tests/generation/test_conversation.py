"""Conversations of the native engine: answers do not depend on when the partner replies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import family_folder
from helpers.flash import decode_statically
from helpers.layouts import ALL_LAYOUTS
from helpers.partners import Partner
from helpers.policies import megatron_model, random_prompts
from helpers.ranks import call_on_ranks, one_group

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import PartialResponse, SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.generation.responses import converse_in_rounds, new_responses

ROOM = 40
PARAMS = SamplingParams(max_length=12, stop_token_ids=(2, *range(5, 16)))
KINDS = {
    "stop tokens": PARAMS,
    "greedy": replace(PARAMS, use_greedy=True),
    "rules": replace(
        PARAMS, min_length=4, repetition_penalty=1.3, temperature=0.8, top_k=20, top_p=0.9
    ),
    "end strings": replace(PARAMS, stop_token_ids=(), end_strings=tuple("etaoinshr"), min_length=3),
}


def begun(prompts: list[Prompt], samples: int = 4) -> list[PartialResponse]:
    return [replace(response, limit=ROOM) for response in new_responses(prompts, samples, 3)]


def in_rounds(
    engine: NativeGenerator,
    responses: list[PartialResponse],
    params: SamplingParams,
    **options: bool,
) -> list[list[PartialResponse]]:
    partner = Partner(responses, room=ROOM, **options)
    converse_in_rounds(engine, responses, params, partner)
    return partner.answers


def assert_same(
    answers: list[list[PartialResponse]], expected: list[list[PartialResponse]]
) -> None:
    assert len(answers) == len(expected)
    for mine, others in zip(answers, expected, strict=True):
        assert len(mine) == len(others)
        for answer, other in zip(mine, others, strict=True):
            assert replace(answer, log_probs=()) == replace(other, log_probs=())
            assert answer.log_probs == pytest.approx(other.log_probs, abs=1e-6)


@pytest.mark.parametrize("patience", [0, 3, 30])
@pytest.mark.parametrize("max_tokens", [None, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_rounds(kind, max_tokens, patience, lm, folder, prompts):
    params = KINDS[kind]
    tokenizer = load_tokenizer(folder)
    responses = begun(prompts)
    expected = in_rounds(NativeGenerator(lm, tokenizer), responses, params)
    assert max(len(answers) for answers in expected) == 4
    assert len({len(answers) for answers in expected}) > 2
    engine = NativeGenerator(lm, tokenizer, max_tokens)
    partner = Partner(responses, room=ROOM, patience=patience, seed=patience)
    engine.converse(responses, params, partner)
    assert_same(partner.answers, expected)
    if patience == 30:
        assert partner.most_waiting > 1


def test_a_sliding_window_and_megatrons_layers(mesh, tmp_path, prompts):
    """Windows of seven tokens begin in the prompt, in answers and in what the partner wrote."""
    folder = family_folder(tmp_path, "mistral_window")
    lm = megatron_model(folder, mesh, torch.float64)
    responses = begun(prompts)
    for is_lean in (True, False):
        engine = NativeGenerator(lm, load_tokenizer(folder), is_lean=is_lean)
        partner = Partner(responses, room=ROOM, patience=5)
        engine.converse(responses, PARAMS, partner)
        assert_same(partner.answers, in_rounds(engine, responses, PARAMS))


def test_a_partner_that_rewrites_the_row(lm, folder, prompts):
    engine = NativeGenerator(lm, load_tokenizer(folder))
    responses = begun(prompts)
    partner = Partner(responses, room=ROOM, patience=5, rewrites=True)
    engine.converse(responses, PARAMS, partner)
    rounds = in_rounds(engine, responses, PARAMS, rewrites=True)
    assert max(len(answers) for answers in rounds) == 4
    assert_same(partner.answers, rounds)
    assert rounds != in_rounds(engine, responses, PARAMS)


def test_a_static_decoder_plays_in_rounds(monkeypatch, lm, folder, prompts):
    decode_statically(monkeypatch)
    engine = NativeGenerator(lm, load_tokenizer(folder), use_graphs=False)
    responses = begun(prompts)
    partner = Partner(responses, room=ROOM, patience=3)
    engine.converse(responses, PARAMS, partner)
    assert_same(partner.answers, in_rounds(engine, responses, PARAMS))


def test_a_call_without_responses(lm, folder):
    NativeGenerator(lm, load_tokenizer(folder)).converse([], PARAMS, Partner([], room=ROOM))


def converse_on_layouts(folder: Path, names: tuple[str, ...]) -> list[Any]:
    """Return the answers of each layout; three prompts, so that ranks have unequal shares."""
    prompts = random_prompts(63, (3, 9, 1))
    results = []
    with one_group():
        for name in names:
            with ALL_LAYOUTS[name].mesh() as mesh:
                lm = megatron_model(folder, mesh, torch.float64)
                engine = NativeGenerator(lm, load_tokenizer(folder), 100)
                for count in (3, 1):
                    responses = begun(prompts[:count], 3 if count > 1 else 1)
                    partner = Partner(responses, room=ROOM, patience=4)
                    engine.converse(responses, PARAMS, partner)
                    results.append(partner.answers)
    return results


@pytest.mark.more
def test_layouts(lm, folder):
    names = ("TP2", "TP2 SP", "PP2", "CP2")
    prompts = random_prompts(63, (3, 9, 1))
    engine = NativeGenerator(lm, load_tokenizer(folder))
    expected = [
        in_rounds(engine, begun(prompts, 3), PARAMS),
        in_rounds(engine, begun(prompts[:1], 1), PARAMS),
    ]
    for of_rank in call_on_ranks(converse_on_layouts, 2, folder, names):
        for answers, others in zip(of_rank, expected * len(names), strict=True):
            assert_same(answers, others)
