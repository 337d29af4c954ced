"""The wire format: text arrays, the choice of a form, malformed answers and the access token."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises_error
from helpers.fake_reward_server import describe
from helpers.models import tiny_llama_folder
from helpers.rewards import request_of
from helpers.tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer
from transformers import AutoModelForCausalLM

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.scorer import load_reward_model
from reinforce_rl.reward_model.server.scoring import RequestScorer
from reinforce_rl.reward_model.server.server import token_of
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.base import (
    STATUS_BAD_PROMPT,
    STATUS_BAD_TEXT,
    STATUS_NOT_FINITE,
    STATUS_OK,
    STATUS_TOO_LONG,
    RewardRequest,
    TextSample,
)
from reinforce_rl.rewards.client import choose_form
from reinforce_rl.rewards.wire import (
    ENVELOPE_BYTES,
    TOKEN_VARIABLE,
    bearer,
    is_authorised,
    read_samples,
    read_token,
    request_arrays,
    split,
    text_arrays,
)
from reinforce_rl.utils.net import is_loopback

MESSAGES = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
SAMPLES = [
    TextSample("plain", "an answer", {"answer": "72", "deep": [{"a": None}]}),
    TextSample("S: be kind<eos>U: hi<eos>A:", " oh\u2028 é ", {}, MESSAGES, finished=False),
    TextSample("", ""),
]
# The reward model's own template, unlike the actor's.
OTHER_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_samples_come_back_from_their_arrays():
    arrays = text_arrays(SAMPLES)
    assert {array.shape for array in arrays.values()} == {(3, 1)}
    read, status = read_samples(arrays)
    assert read == SAMPLES
    assert status.tolist() == [STATUS_OK] * 3
    required = {name: arrays[name] for name in (wire.PROMPTS, wire.RESPONSES)}
    samples = read_samples(required)[0]
    assert samples == [TextSample(sample.prompt, sample.response) for sample in SAMPLES]


@pytest.mark.parametrize(
    ("name", "raw", "status"),
    [
        (wire.RESPONSES, b"\xff", STATUS_BAD_TEXT),
        (wire.RESPONSES, "\ud800".encode("utf-8", "surrogatepass"), STATUS_BAD_TEXT),
        (wire.METADATA, b"{", STATUS_BAD_PROMPT),
        (wire.METADATA, b"[1]", STATUS_BAD_PROMPT),
        (wire.METADATA, b"[" * 100_000, STATUS_BAD_PROMPT),
        (wire.MESSAGES, b'{"role": "user"}', STATUS_BAD_PROMPT),
        (wire.MESSAGES, b'["hi"]', STATUS_BAD_PROMPT),
        (wire.MESSAGES, b'[{"role": "user", "content": ["hi"]}]', STATUS_BAD_PROMPT),
    ],
)
def test_what_cannot_be_read_fails_alone(name, raw, status):
    arrays = text_arrays(SAMPLES)
    arrays[name][1, 0] = raw
    samples, statuses = read_samples(arrays)
    assert statuses.tolist() == [STATUS_OK, status, STATUS_OK]
    assert samples[0] == SAMPLES[0]
    assert samples[2] == SAMPLES[2]


def test_fields_of_different_lengths_are_refused():
    tokens = torch.zeros((2, 3), dtype=torch.long)
    lengths = torch.tensor([3, 3])
    request = RewardRequest(tokens, lengths, ("a", "b"), ("c", "d"), finished=(True,))
    with pytest.raises(ValueError):
        _ = request.samples


def description(**changes: object) -> str:
    """Return a server's description with these values, of any type."""
    return json.dumps({**json.loads(describe().to_json()), **changes})


def test_a_description_comes_back_and_unknown_keys_are_left_out():
    details = {"head": {"layers": [1, 2]}}
    info = describe(input_forms=("text", "tokens"), attributes=["a"], details=details)
    assert wire.ServerInfo.from_json(info.to_json()) == info
    assert wire.ServerInfo.from_json(description(of_a_later_release=1)) == describe()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null", "no reward server's description"),
        ("[" * 100_000, "nested more than 100 levels deep"),
        (
            description(details=json.loads("[" * 200 + "]" * 200)),
            "nested more than 100 levels deep",
        ),
        (description(max_batch_size="8"), "max_batch_size"),
        (description(max_batch_size=True), "max_batch_size"),
        (description(max_batch_size=0), "max_batch_size is 0, expected at least 1"),
        (description(max_request_bytes="8"), "max_request_bytes"),
        (description(max_length=1.5), "max_length"),
        (description(vocab_size=[1]), "vocab_size"),
        (description(tokenizer=[1, 2, 3, 4]), "tokenizer"),
        (description(tokenizer={"vocab_size": 3}), r"tokenizer\.vocab_sha256"),
        (description(input_forms=5), "input_forms"),
        (description(input_forms=[]), "input_forms are none, expected tokens or text"),
        (description(input_forms=["tokens", "images"]), "input_forms are tokens, images, expected"),
        (description(attributes=7), "attributes"),
        (description(attributes=["a", 5]), r"attributes\.1"),
        (description(attributes=["a"] * 1025), "1025 attributes, expected at most 1024"),
        (description(details=[1]), "details"),
        (description(name=5), "name"),
    ],
)
def test_a_description_that_no_client_can_use_is_refused_with_its_key(text, words):
    with pytest.raises(ValueError, match=words):
        wire.ServerInfo.from_json(text)


def test_another_version_and_differences_are_reported_briefly():
    with pytest.raises(wire.OtherVersion) as error:
        wire.ServerInfo.from_json(description(protocol="3\n" * 100_000))
    assert len(str(error.value)) < 250
    assert "\n" not in str(error.value)
    other = describe(details={"a": "b\u009b" * 100_000})
    (difference,) = describe().differences(other, "before", "now")
    assert difference.startswith(r"details: {} before, {'a': 'b\x9bb\x9bb")
    assert len(difference) < 400


@pytest.mark.parametrize(
    ("data", "is_right"),
    [([1.5, 2, math.nan], True), (["1"], False), ([True], False), ([None], False)],
)
def test_only_numbers_are_scores(data, is_right):
    answer = {"outputs": [{"name": "status"}, {"name": "rewards", "data": data}]}
    if is_right:
        wire.check_json_numbers(answer)
        return
    with pytest.raises(ValueError, match="'rewards' holds a JSON"):
        wire.check_json_numbers(answer)


SAME = describe().tokenizer
OTHER = dataclasses.replace(SAME, vocab_sha256="b" * 64)
BOTH = (wire.TOKENS_FORM, wire.TEXT_FORM)


@pytest.mark.parametrize(
    ("info", "asked", "chosen"),
    [
        ({}, "auto", "tokens"),
        ({}, "tokens", "tokens"),
        ({"input_forms": BOTH}, "auto", "tokens"),
        ({"input_forms": BOTH}, "text", "text"),
        ({"input_forms": BOTH, "tokenizer": OTHER}, "auto", "text"),
        ({"input_forms": BOTH, "vocab_size": 100}, "auto", "text"),
        ({"input_forms": ("text",), "tokenizer": None, "vocab_size": None}, "auto", "text"),
    ],
)
def test_the_handshake_chooses_what_is_sent(info, asked, chosen):
    assert SAME is not None
    assert choose_form(describe(**info), "host:1", SAME, 128, asked) == chosen


@pytest.mark.parametrize(
    ("info", "asked", "key", "values"),
    [
        ({}, "text", "reward_server.input.not_read", ["text", "chat template"]),
        (
            {"tokenizer": OTHER},
            "auto",
            "reward_server.tokens.differ",
            ["vocabulary hash", "chat template"],
        ),
        ({"vocab_size": 100}, "auto", "reward_server.tokens.differ", [128, 100]),
        (
            {"input_forms": BOTH, "tokenizer": OTHER},
            "tokens",
            "reward_server.tokens.differ",
            ["vocabulary hash", "input=auto"],
        ),
        (
            {"input_forms": ("text",), "tokenizer": None, "vocab_size": None},
            "tokens",
            "reward_server.input.not_read",
            ["tokens", "reward function"],
        ),
    ],
)
def test_the_handshake_refuses_what_the_server_cannot_read(info, asked, key, values):
    assert SAME is not None
    with raises_error(key, "host:1", *values):
        choose_form(describe(**info), "host:1", SAME, 128, asked)


def test_a_request_is_split_by_count_and_by_bytes():
    # 3 tokens and a length: 32 bytes a sample
    request = request_of([[4] * 3] * 60)
    arrays = request_arrays(request, "tokens", None, 0)
    of_five = ENVELOPE_BYTES + 5 * 32
    for info, sizes in (
        (describe(), [8] * 7 + [4]),
        (describe(max_request_bytes=of_five), [5] * 12),
        (describe(max_request_bytes=of_five + 31), [5] * 12),
        (describe(max_request_bytes=10), [1] * 60),
    ):
        parts = split(arrays, info)
        assert [len(part["tokens"]) for part in parts] == sizes
        for name, array in arrays.items():
            assert np.array_equal(np.concatenate([part[name] for part in parts]), array)


def test_texts_are_split_by_their_own_lengths():
    texts = ("a" * 3000, "b", "c", "d" * 3000, "e" * 9000, "f")
    tokens = torch.zeros((6, 1)).long()
    request = RewardRequest(tokens, torch.ones(6).long(), texts, texts)
    parts = split(text_arrays(request.samples), describe(max_request_bytes=ENVELOPE_BYTES + 6200))
    sizes = [len(part["prompts"]) for part in parts]
    assert sizes == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("rewards", "status", "values", "codes"),
    [
        ([1.0, 2.0], [0, 7], [1.0, None], [0, 7]),
        ([np.inf, np.nan], [0, 0], [None, None], [STATUS_NOT_FINITE] * 2),
        ([0.0, 3.0], [1, 0], [None, 3.0], [1, 0]),
    ],
)
def test_whatever_failed_is_nan(rewards, status, values, codes):
    outputs = {
        "rewards": np.array(rewards, np.float32)[:, None],
        "status": np.array(status, np.int32)[:, None],
    }
    checked, checked_codes, _ = wire.check_answer(outputs.get, 2, 0)
    or_none = [None if np.isnan(value) else value for value in checked.tolist()]
    assert or_none == values
    assert checked_codes.tolist() == codes


@pytest.mark.parametrize(
    ("rewards", "status"),
    [
        (None, np.zeros((1, 1), np.int32)),
        (np.zeros((1, 1)), np.zeros((1, 1), np.int32)),
        (np.zeros((1,), np.float32), np.zeros((1, 1), np.int32)),
        (np.zeros((1, 1), np.float32), np.full((1, 1), 99, np.int32)),
    ],
    ids=["missing", "float64", "shape", "status"],
)
def test_answers_outside_the_protocol_are_refused(rewards, status):
    with pytest.raises(ValueError, match=r"rewards|status"):
        wire.check_answer({"rewards": rewards, "status": status}.get, 1, 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A reward model with a tokenizer and a template, and a folder of the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("world")
    tiny_llama_folder(
        folder / "trunk", vocab_size=96, layers=1, hidden=16, ffn=32, max_positions=64
    )
    write_tiny_tokenizer(folder / "trunk", vocab_size=96, chat_template=OTHER_TEMPLATE)
    write_tiny_tokenizer(folder / "actor", vocab_size=48)
    weight = torch.randn(16, generator=torch.Generator().manual_seed(0))
    RewardHead(weight, torch.tensor(0.5), "mean").save(folder / "head.safetensors")
    return folder


def test_a_model_with_another_tokenizer_reads_its_own_template(world, mesh):
    theirs = load_tokenizer(world / "trunk")
    ours = load_tokenizer(world / "actor")
    assert CHAT_TEMPLATE != OTHER_TEMPLATE
    scorer = RequestScorer(
        load_reward_model(world / "trunk", world / "head.safetensors", mesh), theirs
    )
    assert scorer.input_forms == BOTH
    info = describe(
        tokenizer=TokenizerInfo.from_tokenizer(theirs),
        vocab_size=96,
        input_forms=scorer.input_forms,
    )
    form = choose_form(info, "", TokenizerInfo.from_tokenizer(ours), len(ours), "auto")
    assert form == wire.TEXT_FORM

    chat = ours.apply_chat_template(MESSAGES, tokenize=False)
    samples = [
        TextSample(chat, "oh dear", {}, MESSAGES, finished=True),
        TextSample(chat, "oh dear", {}, MESSAGES, finished=False),
        TextSample("tell me", " no ", {}),
        TextSample("", "", {}, ({"role": "tool", "content": "1"},)),
        TextSample("tell me", "no" * 100, {}),
    ]
    rendered = [
        "<bos>[system] be kind [user] hi [assistant] oh dear ",  # the template ends a turn so
        "<bos>[system] be kind [user] hi [assistant] oh dear",  # cut: it must not look finished
        "<bos>[user] tell me [assistant] no ",
    ]
    (answer,) = scorer([text_arrays(samples)])
    assert answer["status"][:, 0].tolist() == [
        0,
        0,
        0,
        STATUS_BAD_PROMPT,
        STATUS_TOO_LONG,
    ]
    assert np.isnan(answer["rewards"][3:]).all()

    trunk = AutoModelForCausalLM.from_pretrained(world / "trunk").eval()
    head = RewardHead.load(world / "head.safetensors")
    expected = []
    for text in rendered:
        ids = torch.tensor([theirs.convert_tokens_to_ids(tokens_of(text))])
        with torch.no_grad():
            hidden = trunk.model(ids).last_hidden_state[0]
        score = hidden.mean(0) @ head.weight + head.bias
        expected.append(float(score))
    assert answer["rewards"][:3, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == 3


def tokens_of(text: str) -> list[str]:
    """Tokenize by hand: a token a character, special tokens whole."""
    for special, letter in (("<bos>", "\x01"), ("<eos>", "\x02")):
        text = text.replace(special, letter)
    return [{"\x01": "<bos>", "\x02": "<eos>"}.get(letter, letter) for letter in text]


def test_without_a_template_there_are_no_texts(world, mesh, tmp_path):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path, vocab_size=96, chat_template=None))
    scorer = RequestScorer(
        load_reward_model(world / "trunk", world / "head.safetensors", mesh), tokenizer
    )
    assert scorer.input_forms == (wire.TOKENS_FORM,)
    with pytest.raises(ValueError, match=r"this model reads tokens; this request holds"):
        scorer([text_arrays(SAMPLES)])


TOKEN = "a-token-of-24-characters"


@pytest.fixture
def token_file(tmp_path):
    def write(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "token"
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def test_the_file_comes_before_the_environment(token_file, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-altogether")
    assert read_token(token_file(TOKEN + "\n"), "key") == TOKEN
    assert read_token(None, "key") == "another-token-altogether"
    monkeypatch.setenv(TOKEN_VARIABLE, " ")
    assert read_token(None, "key") is None
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert read_token(None, "key") is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused(token_file, mode):
    path = token_file(TOKEN, mode)
    with raises_error("reward_server.token.open_to_others", "the key", path, f"mode {mode:04o}"):
        read_token(path, "the key")


@pytest.mark.parametrize(
    "text", ["", "short", "with a space in its middle", "ünicode-ünicode-ünicode"]
)
def test_what_cannot_be_a_token_is_refused_and_not_shown(token_file, tmp_path, text):
    path = token_file(text)
    with raises_error("reward_server.token.invalid", path) as caught:
        read_token(path, "key")
    assert not text or text not in str(caught.value)
    with raises_error("reward_server.token.not_readable", tmp_path / "none"):
        read_token(tmp_path / "none", "key")


def test_only_the_token_opens():
    assert is_authorised(bearer(TOKEN)["Authorization"], TOKEN)
    assert is_authorised(f"bearer {TOKEN}", TOKEN)
    wrong = [
        None,
        "",
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer ü",
    ]
    assert not any(is_authorised(header, TOKEN) for header in wrong)
    assert is_authorised(None, None)
    assert bearer(None) == {}


def test_only_the_loopback_goes_without_a_token(monkeypatch):
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("no-such-host.invalid")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert token_of(InferenceConfig()) is None
    assert token_of(InferenceConfig(host="0.0.0.0", allow_no_token=True)) is None
    settings = ["inference.token_file", TOKEN_VARIABLE, "inference.allow_no_token=true"]
    with raises_error("serve.token.not_given", "0.0.0.0", *settings):
        token_of(InferenceConfig(host="0.0.0.0"))
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert token_of(InferenceConfig(host="0.0.0.0")) == TOKEN
