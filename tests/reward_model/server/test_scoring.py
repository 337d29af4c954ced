"""From requests to rewards without a server: merging, and the isolation of bad requests.

`test_isolation_server.py` sends the same over HTTP, to be merged by Triton.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from helpers.serve_toy_scorer import TOKEN_RAISE, VOCAB_SIZE, ToyScorer, toy_score
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.wire_requests import HEADER_LENGTH, RequestFuzzer, WireRequest, arrays_of

from reinforce_rl.config.rewards import InferenceConfig, RewardFunctionConfig
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import RankLostError, RewardServerError
from reinforce_rl.reward_model.data import encode_sample
from reinforce_rl.reward_model.server.admission import FrontSettings, Refusal
from reinforce_rl.reward_model.server.health import Progress
from reinforce_rl.reward_model.server.request import read_request
from reinforce_rl.reward_model.server.scoring import (
    FunctionRequestScorer,
    FunctionScorer,
    RequestScorer,
)
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.base import FunctionSpec, TextSample
from reinforce_rl.rewards.function_pool import PING, FunctionPool, PendingScores, Scores
from reinforce_rl.rewards.wire import PROTOCOL_VERSION, ServerInfo, text_arrays

NOISE = 0.25
# Like the template of a model with tools: it fails if the calls are no list, and on a text that it
# cannot add to.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | upper }}: {{ m.content + '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_tiny_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), vocab_size=VOCAB_SIZE, chat_template=TEMPLATE
    )
    return load_tokenizer(folder)


class RaisingScorer(ToyScorer):
    """Raises a test's exception at a certain token."""

    def __init__(self, error: type[BaseException]):
        super().__init__(0.0, 0.0)
        self.calls = 0
        self._error = error

    def score(self, sequences):
        self.calls += 1
        if any(TOKEN_RAISE in sequence for sequence in sequences):
            raise self._error("told to")
        return super().score(sequences)


def request_of(*rows: list[int]) -> dict[str, np.ndarray]:
    return {
        "tokens": np.array(rows, np.int64),
        "sequence_lengths": np.array([[len(row)] for row in rows], np.int64),
    }


def assert_right(answer: dict[str, np.ndarray], scores: np.ndarray, label: object) -> None:
    assert answer["status"].tolist() == [[base.STATUS_OK]] * len(scores), label
    np.testing.assert_allclose(answer["rewards"][:, 0], scores, rtol=1e-5, err_msg=str(label))


LIMITS = FrontSettings(
    inference=InferenceConfig(max_batch_size=64), max_request_bytes=1 << 20, max_sequence_length=128
)


def let_in(request: WireRequest, forms: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Admit a request. Raises Refusal."""
    return arrays_of(read_request(request.body, request.headers.get(HEADER_LENGTH), LIMITS, forms))


def fuzz(scorer: RequestScorer, fuzzer: RequestFuzzer, rounds: int, rank: int = 0) -> Counter[str]:
    """Return the counts of the outcomes of wrong requests."""
    outcomes: Counter[str] = Counter()
    for _ in range(rounds):
        bad, *good = fuzzer.batch(good=7)
        arrays = [let_in(request, scorer.input_forms) for request in good]
        try:
            arrays.insert(rank, let_in(bad, scorer.input_forms))
        except Refusal as refusal:
            assert refusal.code in (400, 413)
            outcomes["refused"] += 1
        answers = scorer(arrays)
        if len(answers) > len(good):
            answer = answers.pop(rank)
            outcomes.update(map(str, answer["status"][:, 0]))
            assert (np.isnan(answer["rewards"]) == (answer["status"] != base.STATUS_OK)).all(), bad
        for request, answer in zip(good, answers, strict=True):
            assert_right(answer, request.scores, bad)
    return outcomes


def fuzz_model(tokenizer, deterministic: bool, rounds: int, seed: int) -> None:
    scorer = RequestScorer(RaisingScorer(RuntimeError), tokenizer, deterministic=deterministic)
    outcomes = fuzz(scorer, RequestFuzzer(seed), rounds, rank=seed % 8)
    print(f"seed {seed}: {dict(outcomes)}")
    assert outcomes["refused"] > rounds / 5
    for status in (*range(1, 8), base.STATUS_BAD_PROMPT):
        assert outcomes[str(status)] > 0, status


@pytest.mark.parametrize("deterministic", [True, False])
def test_one_bad_request_among_seven_good(tokenizer, deterministic):
    fuzz_model(tokenizer, deterministic, 1000, seed=18 + deterministic)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1800, 1801])
@pytest.mark.parametrize("deterministic", [True, False])
def test_one_bad_request_among_seven_good_ten_thousand_times(tokenizer, deterministic, seed):
    fuzz_model(tokenizer, deterministic, 10_000, seed)


@pytest.mark.parametrize(
    "error", [RuntimeError, MemoryError, RecursionError, SystemExit, KeyboardInterrupt]
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_sample_at_which_a_model_raises_fails_alone(tokenizer, deterministic, error):
    model = RaisingScorer(error)
    rows = [[3, row] for row in range(32)]
    bad = [*rows[:20], [TOKEN_RAISE, 1], *rows[21:]]
    scorer = RequestScorer(model, tokenizer, deterministic=deterministic)
    left, right = scorer([request_of(*bad), request_of([7, 8])])
    assert_right(right, np.array([toy_score([7, 8])], np.float32), error)
    failed_rows = [row for row, status in enumerate(left["status"][:, 0]) if status]
    assert failed_rows == [20]
    assert left["status"][20, 0] == base.STATUS_INTERNAL
    assert np.isnan(left["rewards"][20, 0])
    others = [row for row in range(32) if row != 20]
    np.testing.assert_allclose(
        left["rewards"][others, 0], [toy_score(rows[row]) for row in others], rtol=1e-6
    )
    assert model.calls < 2 + 2 * 6 + 2  # in halves, not one by one
    done = scorer.progress.read()
    assert done.requests == 2
    assert done.samples == 33
    assert done.failed == 1


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"content": "\ud800"}, base.STATUS_BAD_PROMPT),
        ({"tool_calls": 5}, base.STATUS_BAD_PROMPT),
        ({"content": None}, base.STATUS_BAD_PROMPT),
        ({"content": 5}, base.STATUS_BAD_PROMPT),
        ({"more": [[[[]]]] * 99}, base.STATUS_OK),
    ],
)
def test_a_message_that_the_template_or_the_tokenizer_cannot_read_fails_alone(
    tokenizer, message, status
):
    scorer = RequestScorer(ToyScorer(0.0, 0.0), tokenizer)
    hi = {"role": "user", "content": "hi"}
    samples = [
        TextSample("hi", "yes", {}, (hi,)),
        TextSample("hi", "yes", {}, ({**hi, **message},)),
    ]
    alone, both = scorer([text_arrays(samples[:1]), text_arrays(samples)])
    assert both["status"][:, 0].tolist() == [base.STATUS_OK, status]
    assert both["rewards"][0] == alone["rewards"][0]


def test_a_request_of_no_form_fails_alone_among_others_and_raises_alone(tokenizer):
    """The front door admits none; each is parsed separately all the same."""
    scorer = RequestScorer(ToyScorer(0.0, 0.0), tokenizer)
    odd = [
        {"tokens": np.ones((2, 3), np.int64)},
        {**request_of([1]), "sentences": np.array([[b"a"]], object)},
    ]
    first, good, last = scorer([odd[0], request_of([7, 8]), odd[1]])
    assert_right(good, np.array([toy_score([7, 8])], np.float32), "")
    assert first["status"].tolist() == [[base.STATUS_INTERNAL]] * 2
    assert last["status"].tolist() == [[base.STATUS_INTERNAL]]
    assert np.isnan(last["rewards"]).all()
    with pytest.raises(
        ValueError, match=r"this model reads tokens or text; this request holds \['tokens'\]"
    ):
        scorer(odd[:1])


class Functions(FunctionPool):
    """Scores by the response's length; started for the module."""

    def __init__(self):
        spec = FunctionSpec("reward_function", "helpers.reward_functions.counted", {})
        super().__init__({"counted": spec}, RewardFunctionConfig(sample_timeout_seconds=20.0))


@pytest.fixture(scope="module")
def functions():
    pool = Functions()
    pool.start()
    yield pool
    pool.close()


def fuzz_function(pool: FunctionPool, rounds: int, seed: int) -> None:
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"counted": 1.0}))
    fuzzer = RequestFuzzer(
        seed, encode=list, score=lambda text: text_length("".join(text)), forms=("text",)
    )
    outcomes = fuzz(scorer, fuzzer, rounds)
    print(f"seed {seed}: {dict(outcomes)}")
    assert min(outcomes["refused"], outcomes["5"], outcomes["9"]) > 0


def text_length(rendered: str) -> float:
    return float(len(rendered.removeprefix("U: hi<eos>A: ").removesuffix("<eos>")))


@pytest.mark.more
def test_one_bad_request_among_seven_good_of_a_function(functions):
    fuzz_function(functions, 100, seed=18)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_bad_request_among_seven_good_of_a_function_a_thousand_times(functions):
    fuzz_function(functions, 1000, seed=1800)


def test_a_sample_that_ends_all_processes_of_a_function_fails_alone(functions):
    scorer = FunctionRequestScorer(FunctionScorer(functions, {"counted": 1.0}))
    good = text_arrays([TextSample("p", "abc"), TextSample("p", "ab")])
    killer = text_arrays([TextSample("p", "kill")])
    first, bad, last = scorer([good, killer, good])
    assert_right(first, np.array([3, 2], np.float32), "")
    assert_right(last, np.array([3, 2], np.float32), "")
    assert bad["status"].tolist() == [[base.STATUS_INTERNAL]]
    assert np.isnan(bad["rewards"]).all()
    with pytest.raises(RewardServerError):  # an error of HTTP: the next server may do better
        scorer([killer])
    assert_right(scorer([good])[0], np.array([3, 2], np.float32), "")


def test_metadata_that_is_nested_deeply_never_reaches_the_processes(functions):
    """Each process would parse it again, with a deeper stack."""
    scorer = FunctionRequestScorer(FunctionScorer(functions, {"counted": 1.0}))
    pid = functions._host.process.pid if functions._host else None
    for depth in (10, 62, 100, 500, 900, 960, 990):
        arrays = text_arrays([TextSample("p", "abc"), TextSample("p", "ab")])
        arrays[wire.METADATA][0, 0] = (
            json.dumps({"a": 0}).replace("0", "[" * depth + "]" * depth).encode()
        )
        (answer,) = scorer([arrays])
        expected = base.STATUS_OK if depth < 64 else base.STATUS_BAD_PROMPT
        assert answer["status"][:, 0].tolist() == [expected, base.STATUS_OK], depth
    assert functions._host is not None
    assert functions._host.process.pid == pid


def test_deterministic_requests_are_scored_apart_and_others_together(tokenizer):
    requests = [request_of([1, 2]), request_of([3, 4], [5, 6])]
    apart = RequestScorer(ToyScorer(0.0, NOISE), tokenizer, deterministic=True)(requests)
    merged = RequestScorer(ToyScorer(0.0, NOISE), tokenizer, deterministic=False)(requests)
    for index, request in enumerate(requests):
        exact = np.array([[toy_score(row)] for row in request["tokens"].tolist()])
        assert np.allclose(apart[index]["rewards"], exact + NOISE * len(exact))
        assert np.allclose(merged[index]["rewards"], exact + NOISE * 3)
        assert apart[index]["status"].shape == merged[index]["status"].shape == exact.shape


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_lost_rank_is_an_error_of_the_request_and_no_status(tokenizer, deterministic):
    """A status is final; an HTTP error is retried, and the next server can score the samples."""

    class Lost(ToyScorer):
        def score(self, sequences):
            raise RankLostError("rank 1 died")

    with pytest.raises(RankLostError, match="rank 1 died"):
        RequestScorer(Lost(0.0, 0.0), tokenizer, deterministic=deterministic)(
            [request_of([1]), request_of([2])]
        )


@pytest.mark.parametrize(
    ("scores", "status"),
    [
        *(([score], base.STATUS_NOT_FINITE) for score in (1e300, math.inf, -math.inf, math.nan)),
        *((scores, base.STATUS_INTERNAL) for scores in ([], [1.0, 2.0])),
    ],
)
def test_scores_that_float32_cannot_hold_or_of_another_number_are_refused(
    tokenizer, scores, status
):
    class Wrong(ToyScorer):
        def score(self, sequences):
            return scores

    (answer,) = RequestScorer(Wrong(0.0, 0.0), tokenizer)([request_of([1, 2])])
    assert answer["status"].tolist() == [[status]]
    assert math.isnan(answer["rewards"][0, 0])


def test_a_description_survives_its_json_and_other_versions_are_refused(tokenizer):
    info = ServerInfo(
        "rm", 8, 32, 128, TokenizerInfo.from_tokenizer(tokenizer), True, False, {"pooling": "mean"}
    )
    assert ServerInfo.from_json(info.to_json()) == info
    with pytest.raises(ValueError, match=f"this client version {PROTOCOL_VERSION}:"):
        ServerInfo.from_json(
            info.to_json().replace(f'"protocol": {PROTOCOL_VERSION}', '"protocol": 99')
        )
    for text in ("[]", "{}", f'{{"protocol": {PROTOCOL_VERSION}}}', "no json"):
        with pytest.raises(ValueError):
            ServerInfo.from_json(text)


class LengthPool(FunctionPool):
    """Scores by the response's length at once; an empty response times out."""

    def __init__(self):
        self.asked: list[tuple[str, int]] = []

    def submit(self, function, samples, on_sample=lambda: None):
        self.asked.append((function, len(samples)))
        for _ in samples:
            on_sample()
        lengths = np.array([len(sample.response) for sample in samples], np.float32)
        status = np.where(lengths == 0, base.STATUS_TIMED_OUT, base.STATUS_OK).astype(np.int32)
        faults = {
            row: f"{function}: exceeded"
            for row, sample in enumerate(samples)
            if not sample.response
        }
        scores = Scores(np.where(lengths == 0, np.nan, lengths).astype(np.float32), status, faults)
        pending = PendingScores(function, scores, 0, on_sample)
        pending.future.set_result(scores)
        return pending


@pytest.fixture
def pool() -> LengthPool:
    return LengthPool()


def test_merged_requests_are_asked_together_and_a_bad_sample_is_left_out(pool):
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"f": 1.0}))
    first = text_arrays([TextSample("p", text) for text in ("abc", "", "ab")])
    second = text_arrays([TextSample("", "a")])
    first[wire.METADATA][2, 0] = b"{"
    left, right = scorer([first, second])
    assert left["status"].tolist() == [
        [base.STATUS_OK],
        [base.STATUS_TIMED_OUT],
        [base.STATUS_BAD_PROMPT],
    ]
    assert left["rewards"][0, 0] == 3
    for value in left["rewards"][1:, 0]:
        assert math.isnan(value)
    assert right["status"].tolist() == [[0]]
    assert right["rewards"].tolist() == [[1.0]]
    assert pool.asked == [("f", 2), ("f", 1)]
    done = scorer.progress.read()
    assert done.requests == 2
    assert done.samples == 4
    assert done.failed == 2
    assert scorer.input_forms == (wire.TEXT_FORM,)


def test_the_canary_does_not_reach_the_function(pool):
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"f": 1.0}))
    canary = {
        tensor["name"]: np.array([[tensor["data"][0].encode()]], object)
        for tensor in scorer.canary_inputs()
    }
    scorer([canary])
    assert pool.asked == [(PING, 1)]


def test_each_sample_is_progress(pool, monkeypatch):
    """A long batch of a slow function within its time limit is no stuck server."""
    beats: list[None] = []
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"f": 1.0}))
    monkeypatch.setattr(Progress, "beat", lambda _: beats.append(None))
    scorer([text_arrays([TextSample("p", "a"), TextSample("p", "b"), TextSample("p", "c")])])
    assert len(beats) == 3


def test_the_log_names_what_failed(pool, caplog):
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"f": 1.0}))
    scorer([text_arrays([TextSample("p", "a"), TextSample("p", ""), TextSample("p", "")])])
    assert "event=function_failed function=f faults={'f: exceeded': 2}" in caplog.text


def test_tokens_are_refused(pool):
    tokens = {"tokens": np.zeros((1, 1), np.int64), "sequence_lengths": np.ones((1, 1), np.int64)}
    with pytest.raises(ValueError, match=r"this model reads text; this request holds"):
        FunctionRequestScorer(FunctionScorer(pool, {"f": 1.0}))([tokens])


@pytest.mark.parametrize(
    "record", [{"reinforce_rl_canary": True}, {"canary": True}, {"canary": 32 * "0"}]
)
def test_no_sample_of_a_client_passes_for_the_canary(pool, record):
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"f": 1.0}))
    scorer([text_arrays([TextSample("", "abc", record=record)])])
    assert pool.asked == [("f", 1)]


class Raises(ToyScorer):
    """Scores as the toy does, and raises for a sequence of one odd length."""

    attributes = ("even",)

    def score_attributes(self, sequences):
        if any(len(sequence) == self.odd for sequence in sequences):
            raise ValueError("told to")
        evens = [[float(len(sequence) % 2 == 0)] for sequence in sequences]
        return base.AttributeScores(self.score(sequences), evens)


def test_functions_beside_a_model_are_a_weighted_sum_and_each_score_is_sent(pool, tokenizer):
    model = Raises(0.0, 0.0)
    samples = [TextSample("ask", text) for text in ("abc", "ab", "", "abcdefgh")]
    rows = [encode_sample(ChatRenderer(tokenizer), sample) for sample in samples]
    model.odd = len(rows[3])
    weights = {"brief": -0.5, "shown": 0.0}
    function_scorer = FunctionScorer(pool, weights, model, "rm", 2.0)
    scorer = FunctionRequestScorer(function_scorer, tokenizer)
    assert scorer.attributes == ("rm", "rm/even", "brief", "shown")
    arrays = text_arrays([*samples, TextSample("p", "abc")])
    arrays[wire.METADATA][4, 0] = b"{"
    (answer,) = scorer([arrays])
    # neither the function nor the model was called
    failed = [base.STATUS_TIMED_OUT, base.STATUS_INTERNAL, base.STATUS_BAD_PROMPT]
    assert answer["status"][:, 0].tolist() == [0, 0, *failed]
    for row in (0, 1):
        score = toy_score(rows[row])
        size = float(len(samples[row].response))
        np.testing.assert_allclose(answer["rewards"][row], [2.0 * score - 0.5 * size], rtol=1e-5)
        np.testing.assert_allclose(
            answer["attributes"][row], [score, len(rows[row]) % 2 == 0, size, size], rtol=1e-5
        )
    assert np.isnan(answer["rewards"][2:]).all()
    assert np.isnan(answer["attributes"][2:]).all()
    assert scorer.input_forms == (wire.TEXT_FORM,)
    canary = {
        tensor["name"]: np.array([[tensor["data"][0].encode()]], object)
        for tensor in scorer.canary_inputs()
    }
    pool.asked.clear()
    scorer([canary])
    assert pool.asked == [(PING, 1), (PING, 1)]


def test_a_single_function_with_a_weight_is_a_sum_of_one(pool):
    scorer = FunctionRequestScorer(FunctionScorer(pool, {"f": 3.0}))
    (answer,) = scorer([text_arrays([TextSample("p", "abc")])])
    assert answer["rewards"].tolist() == [[9.0]]
    assert answer["attributes"].tolist() == [[3.0]]
