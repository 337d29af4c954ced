"""Texts to a server: the arrays that travel, who is sent which form, and a reward model with another tokenizer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers.fake_reward_server import describe
from helpers.models import tiny_llama_folder
from helpers.tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer
from transformers import AutoModelForCausalLM

from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.scorer import load_reward_model
from reinforce_rl.reward_server.scoring import RequestScorer
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.base import RewardRequest, TextSample
from reinforce_rl.rewards.wire import choose_form, read_samples, text_arrays

MESSAGES = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
SAMPLES = [
    TextSample("plain", "an answer", {"answer": "72", "deep": [{"a": None}]}),
    TextSample("S: be kind<eos>U: hi<eos>A:", " oh\u2028 é ", {}, MESSAGES, finished=False),
    TextSample("", ""),
]
# The reward model's own template, unlike the actor's.
OTHER_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_samples_come_back_from_their_arrays():
    arrays = text_arrays(SAMPLES)
    assert {array.shape for array in arrays.values()} == {(3, 1)}
    read, status = read_samples(arrays)
    assert read == SAMPLES
    assert status.tolist() == [base.STATUS_OK] * 3
    required = {name: arrays[name] for name in (wire.PROMPTS, wire.RESPONSES)}
    assert read_samples(required)[0] == [TextSample(one.prompt, one.response) for one in SAMPLES]


@pytest.mark.parametrize(
    ("name", "raw", "status"),
    [
        (wire.RESPONSES, b"\xff", base.STATUS_BAD_TEXT),
        (wire.RESPONSES, "\ud800".encode("utf-8", "surrogatepass"), base.STATUS_BAD_TEXT),
        (wire.METADATA, b"{", base.STATUS_BAD_PROMPT),
        (wire.METADATA, b"[1]", base.STATUS_BAD_PROMPT),
        (wire.METADATA, b"[" * 100_000, base.STATUS_BAD_PROMPT),
        (wire.MESSAGES, b'{"role": "user"}', base.STATUS_BAD_PROMPT),
        (wire.MESSAGES, b'["hi"]', base.STATUS_BAD_PROMPT),
        (wire.MESSAGES, b'[{"role": "user", "content": ["hi"]}]', base.STATUS_BAD_PROMPT),
    ],
)
def test_what_cannot_be_read_fails_alone(name, raw, status):
    arrays = text_arrays(SAMPLES)
    arrays[name][1, 0] = raw
    samples, found = read_samples(arrays)
    assert found.tolist() == [base.STATUS_OK, status, base.STATUS_OK]
    assert [samples[0], samples[2]] == [SAMPLES[0], SAMPLES[2]]


def test_fields_of_different_lengths_are_refused():
    tokens = torch.zeros((2, 3), dtype=torch.long)
    request = RewardRequest(tokens, torch.tensor([3, 3]), ("a", "b"), ("c", "d"), finished=(True,))
    with pytest.raises(ValueError):
        _ = request.samples


SAME = describe().tokenizer
OTHER = dataclasses.replace(SAME, vocab_sha256="b" * 64)
BOTH = (wire.TOKENS_FORM, wire.TEXT_FORM)


@pytest.mark.parametrize(
    ("info", "asked", "chosen"),
    [
        ({}, "auto", "tokens"),
        ({}, "tokens", "tokens"),
        ({}, "text", "no chat template"),
        ({"tokenizer": OTHER}, "auto", "vocabulary hash .* chat template, so that texts can be sent"),
        ({"vocab_size": 100}, "auto", "can produce 128 token ids, the reward model knows 100"),
        ({"input_forms": BOTH}, "auto", "tokens"),
        ({"input_forms": BOTH}, "text", "text"),
        ({"input_forms": BOTH, "tokenizer": OTHER}, "auto", "text"),
        ({"input_forms": BOTH, "tokenizer": OTHER}, "tokens", "vocabulary hash .* set input=auto"),
        ({"input_forms": BOTH, "vocab_size": 100}, "auto", "text"),
        ({"input_forms": ("text",), "tokenizer": None, "vocab_size": None}, "auto", "text"),
        ({"input_forms": ("text",), "tokenizer": None, "vocab_size": None}, "tokens", "a reward function"),
    ],
)
def test_the_handshake_chooses_what_is_sent(info, asked, chosen):
    assert SAME is not None
    if chosen in BOTH:
        assert choose_form(describe(**info), "host:1", SAME, 128, asked) == chosen
    else:
        with pytest.raises(ConfigError, match=f"host:1 .*{chosen}"):
            choose_form(describe(**info), "host:1", SAME, 128, asked)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A reward model with its own tokenizer and template, and the folder of an actor's tokenizer."""
    folder = tmp_path_factory.mktemp("world")
    tiny_llama_folder(folder / "trunk", vocab_size=96, layers=1, hidden=16, ffn=32, max_positions=64)
    write_tiny_tokenizer(folder / "trunk", vocab_size=96, chat_template=OTHER_TEMPLATE)
    write_tiny_tokenizer(folder / "actor", vocab_size=48)
    RewardHead(torch.randn(16, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5), "mean").save(
        folder / "head.safetensors"
    )
    return folder


def test_a_model_with_another_tokenizer_reads_its_own_template(world, mesh):
    theirs, ours = load_tokenizer(world / "trunk"), load_tokenizer(world / "actor")
    assert CHAT_TEMPLATE != OTHER_TEMPLATE
    scorer = RequestScorer(load_reward_model(world / "trunk", world / "head.safetensors", mesh), theirs)
    assert scorer.input_forms == BOTH
    info = describe(tokenizer=TokenizerInfo.from_tokenizer(theirs), vocab_size=96, input_forms=scorer.input_forms)
    assert choose_form(info, "", TokenizerInfo.from_tokenizer(ours), len(ours), "auto") == wire.TEXT_FORM

    samples = [
        TextSample(ours.apply_chat_template(MESSAGES, tokenize=False), "oh dear", {}, MESSAGES, finished=True),
        TextSample(ours.apply_chat_template(MESSAGES, tokenize=False), "oh dear", {}, MESSAGES, finished=False),
        TextSample("tell me", " no ", {}),
        TextSample("", "", {}, ({"role": "tool", "content": "1"},)),
        TextSample("tell me", "no" * 100, {}),
    ]
    rendered = [
        "<bos>[system] be kind [user] hi [assistant] oh dear<eos>",
        "<bos>[system] be kind [user] hi [assistant] oh dear",  # cut: it must not look finished
        "<bos>[user] tell me [assistant] no<eos>",
    ]
    (answer,) = scorer([text_arrays(samples)])
    assert answer["status"][:, 0].tolist() == [0, 0, 0, base.STATUS_BAD_PROMPT, base.STATUS_TOO_LONG]
    assert np.isnan(answer["rewards"][3:]).all()

    trunk = AutoModelForCausalLM.from_pretrained(world / "trunk").eval()
    head = RewardHead.load(world / "head.safetensors")
    expected = []
    for text in rendered:
        ids = torch.tensor([theirs.convert_tokens_to_ids(tokens_of(text))])
        with torch.no_grad():
            hidden = trunk.model(ids).last_hidden_state[0]
        expected.append(float(hidden.mean(0) @ head.weight + head.bias))
    assert answer["rewards"][:3, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == 3


def tokens_of(text: str) -> list[str]:
    """By hand: a character a token, special ones whole."""
    for special, letter in (("<bos>", "\x01"), ("<eos>", "\x02")):
        text = text.replace(special, letter)
    return [{"\x01": "<bos>", "\x02": "<eos>"}.get(letter, letter) for letter in text]


def test_without_a_template_there_are_no_texts(world, mesh, tmp_path):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path, vocab_size=96, chat_template=None))
    scorer = RequestScorer(load_reward_model(world / "trunk", world / "head.safetensors", mesh), tokenizer)
    assert scorer.input_forms == (wire.TOKENS_FORM,)
    with pytest.raises(ValueError, match=r"this model reads tokens; this request holds"):
        scorer([text_arrays(SAMPLES)])
