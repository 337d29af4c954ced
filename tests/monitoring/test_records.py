from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.rows import write_rows

from reinforce_rl.algorithm.kl import token_kl
from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.monitoring import records
from reinforce_rl.monitoring.records import (
    SAMPLE_COLUMNS,
    TOKEN_COLUMNS,
    RolloutRow,
    Samples,
    SampleTokens,
    column_types,
    drop_later_samples,
    join_samples,
    read_rows,
    read_table,
    read_tokens,
    rollout_files,
    sample_rows,
    token_columns,
    worst_tokens,
    write_records,
    write_samples,
)
from reinforce_rl.monitoring.run_folder import RunFolder

PROMPTS = [Prompt(7, "tea", (5, 6, 7), {"limit": 80, "answer": "ü"}), Prompt(9, "a ü", (8, 9))]
LENGTHS = [4, 0, 2, 5]  # one response is empty


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(tiny_llama_folder(tmp_path_factory.mktemp("model"))))


def batch_of(seed: int = 0) -> ReinforceBatch:
    """Two prompts with two samples each; the padding token also occurs in responses."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [prompt.tokens for prompt in PROMPTS for _ in range(2)]
    width = 9
    sequences = torch.full((4, width), 4)
    for i, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=True)):
        ids = [*prompt, *torch.randint(4, 20, (length,), generator=draw).tolist()]
        sequences[i, : len(ids)] = torch.tensor(ids)

    def per_token() -> torch.Tensor:
        # not 0 on padding, which must not be recorded
        return torch.randn(4, max(LENGTHS), generator=draw)

    source_rewards = {"short": torch.tensor([1.0, math.nan, 0.0, 3.0])}
    rewards = torch.tensor([0.5, math.nan, -1.0, 2.0])
    lengths = [len(prompt) for prompt in prompts]
    prompt_lengths = torch.tensor(lengths)
    group_ids = torch.tensor([7, 7, 9, 9])
    sample_ids = torch.tensor([0, 1, 0, 1])
    valid = torch.tensor([True, False, True, False])
    rollouts = RolloutBatch(
        sequences=sequences,
        prompt_lengths=prompt_lengths,
        response_lengths=torch.tensor(LENGTHS),
        group_ids=group_ids,
        sample_ids=sample_ids,
        finish_reasons=("stop", "stop", "length", "outside_vocabulary"),
        rewards=rewards,
        valid=valid,
        generator_log_probs=per_token(),
        log_probs=per_token(),
        init_log_probs=per_token(),
        source_rewards=source_rewards,
        score_faults=(None, "took longer than 3 s", None, None),
    )
    each = torch.arange(4.0)
    advantages = per_token().where(rollouts.response_mask, 0.0)
    return ReinforceBatch(rollouts, each, each + 1, each + 2, advantages, rollouts.valid, each + 3)


def samples_of(batch: ReinforceBatch, tokenizer, prompts=PROMPTS) -> Samples:
    rows = sample_rows(3, prompts, batch.rollouts, tokenizer, batch)
    return Samples(
        rows, token_columns(batch.rollouts, kl_estimator="k1", advantages=batch.advantages)
    )


def test_each_value_is_that_of_the_batch(tmp_path, tokenizer):
    batch = batch_of()
    path = tmp_path / "rollouts" / "step_00003.parquet"
    write_records(path, join_samples([samples_of(batch, tokenizer)], tokenizer))
    rows = read_rows(path)
    kl = token_kl(batch.rollouts.log_probs, batch.rollouts.init_log_probs, torch.ones(4, 5) > 0)
    for i, row in enumerate(rows):
        prompt = PROMPTS[i // 2]
        length = LENGTHS[i]
        tokens = read_tokens(path)[i]
        assert row.step == 3
        assert row.prompt_id == prompt.id
        assert row.sample_id == i % 2
        expected = RunFolder(tmp_path).tokens(3, [prompt.id])[prompt.id, i % 2]
        assert tokens == expected
        assert tokens.prompt_tokens == list(prompt.tokens)
        assert row.prompt == prompt.text
        start = len(prompt.tokens)
        assert (
            tokens.response_tokens == batch.rollouts.sequences[i, start : start + length].tolist()
        )
        assert "".join(tokens.token_texts or []) == tokenizer.decode(tokens.response_tokens)
        for name, values in {
            "policy_log_probs": batch.rollouts.log_probs,
            "reference_log_probs": batch.rollouts.init_log_probs,
            "generator_log_probs": batch.rollouts.generator_log_probs,
            "token_kl": kl,
            "token_advantages": batch.advantages,
        }.items():
            assert values is not None, name
            assert getattr(tokens, name) == values[i, :length].tolist(), name
    assert [row.score_fault for row in rows] == [None, "took longer than 3 s", None, None]
    assert math.isnan(rows[1].reward)
    assert rows[0].source_rewards == {"short": 1.0}
    assert rows[0].set_name == "train"
    assert [row.shaped_reward for row in rows][::2] == [3.0, 5.0]
    assert math.isnan(rows[3].shaped_reward)
    assert [row.kl for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert rows[2].baseline == 4.0
    records = [row.record for row in rows]
    assert records == ['{"limit": 80, "answer": "ü"}'] * 2 + ["{}"] * 2
    recorded = RunFolder(tmp_path).tokens(3, [7])
    assert recorded.keys() == {(7, 0), (7, 1)}
    assert RunFolder(tmp_path).tokens(3, [5]) == {}


def test_tokens_of_an_environment_are_recorded_as_such(tmp_path, tokenizer):
    batch = batch_of()
    policy_mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    rollouts = dataclasses.replace(batch.rollouts, policy_mask=policy_mask)
    path = tmp_path / "rollouts" / "step_00003.parquet"
    samples = samples_of(dataclasses.replace(batch, rollouts=rollouts), tokenizer)
    write_records(path, join_samples([samples], tokenizer))
    plain_path = tmp_path / "plain" / "step_00003.parquet"
    write_records(plain_path, join_samples([samples_of(batch, tokenizer)], tokenizer))
    pairs = zip(read_tokens(path), read_tokens(plain_path), strict=True)
    for i, (tokens, plain) in enumerate(pairs):
        mask = policy_mask[i, : LENGTHS[i]].tolist()
        assert tokens.policy_mask == mask
        assert plain.policy_mask is None
        assert tokens.response_tokens == plain.response_tokens
        of_policy = [kl if is_own else 0.0 for kl, is_own in zip(plain.token_kl, mask, strict=True)]
        assert tokens.token_kl == of_policy


def test_the_worst_tokens_by_brute_force(tmp_path, tokenizer):
    batch = batch_of(seed=4)
    log_probs = batch.rollouts.log_probs
    generator = batch.rollouts.generator_log_probs
    assert log_probs is not None
    assert generator is not None
    log_probs[0, 1] = math.nan  # unknown
    path = tmp_path / "step_00003.parquet"
    write_records(path, join_samples([samples_of(batch, tokenizer)], tokenizer))
    expected = []
    for i in (0, 2):  # the valid ones
        texts = read_tokens(path)[i].token_texts or []
        for t in range(LENGTHS[i]):
            prompt = PROMPTS[i // 2].text
            before = (prompt + "".join(texts[:t]))[-40:]
            pair = float(log_probs[i, t]), float(generator[i, t])
            place = (PROMPTS[i // 2].id, i % 2, t)
            expected.append((*place, repr(texts[t]), repr(before), *pair))
    expected = [token_row for token_row in expected if not math.isnan(token_row[5])]
    expected.sort(key=lambda token_row: -abs(token_row[5] - token_row[6]))
    assert len(expected) == 5
    assert worst_tokens(path, 9) == expected
    assert worst_tokens(path, 2) == expected[:2]
    limit = abs(expected[3][5] - expected[3][6])
    assert worst_tokens(path, 9, above=limit) == expected[:3]


def test_without_log_probs_no_token_is_the_worst(tmp_path, tokenizer):
    batch = batch_of()
    path = tmp_path / "step_00003.parquet"
    for changes in (
        {"generator_log_probs": None},
        {"log_probs": None},
        {"valid": torch.zeros(4).bool()},
    ):
        rollouts = dataclasses.replace(batch.rollouts, **changes)
        parts = [samples_of(dataclasses.replace(batch, rollouts=rollouts), tokenizer)]
        samples = join_samples(parts, tokenizer)
        write_records(
            path,
            samples,
        )
        assert worst_tokens(path) == []
    rows = sample_rows(3, PROMPTS, batch.rollouts, tokenizer, batch)
    write_records(path, Samples(rows))
    assert worst_tokens(path) == [], "tokens are not recorded"


@pytest.mark.parametrize("split", [1, 2, 3])
def test_ranks_together_record_what_one_does(tmp_path, tokenizer, split):
    """Also with a rank without samples, which has no log-probs."""
    batch = batch_of()
    parts = []
    for rows in (torch.arange(split), torch.arange(split, 4), torch.arange(0)):
        local_rollouts = batch.rollouts.select(rows)
        if not len(rows):
            local_rollouts = dataclasses.replace(
                local_rollouts, log_probs=None, init_log_probs=None, generator_log_probs=None
            )
        vectors = (batch.kl, batch.rewards_with_kl, batch.baseline)
        each = [values[rows] for values in vectors]
        part = ReinforceBatch(
            local_rollouts,
            *each,
            batch.advantages[rows, : local_rollouts.width],
            batch.trains[rows],
            batch.shaped_rewards[rows],
        )
        parts.append(samples_of(part, tokenizer))
    samples = join_samples([samples_of(batch, tokenizer)], tokenizer)
    write_records(tmp_path / "one.parquet", samples)
    write_records(tmp_path / "three.parquet", join_samples(parts, tokenizer))
    alone = read_table(tmp_path / "one.parquet").to_pydict()
    joined = read_table(tmp_path / "three.parquet").to_pydict()
    # The mean over a response's tokens has another width.
    assert alone.pop("advantage") == pytest.approx(joined.pop("advantage"), abs=1e-6)
    assert alone == joined
    assert join_samples([], tokenizer) == Samples([])


def test_what_was_not_computed_is_null(tmp_path, tokenizer):
    batch = batch_of().rollouts
    batch = dataclasses.replace(batch, log_probs=None, init_log_probs=None)
    rows = sample_rows(0, PROMPTS, batch, tokenizer, set_name="validation")
    path = tmp_path / "step_00000.parquet"
    samples = join_samples([Samples(rows, token_columns(batch))], tokenizer)
    write_records(path, samples)
    tokens = read_tokens(path)[2]
    assert len(tokens.generator_log_probs or []) == 2
    assert (
        tokens.policy_log_probs,
        tokens.reference_log_probs,
        tokens.token_kl,
        tokens.token_advantages,
    ) == (None,) * 4
    write_records(path, join_samples([Samples(rows)], tokenizer))
    assert read_tokens(path) == []
    assert math.isnan(read_rows(path)[0].kl)
    empty = samples_of(dataclasses.replace(batch_of(), rollouts=batch), tokenizer).rows[1:2]
    row = batch.select(torch.tensor([1]))
    none = dataclasses.replace(row, response_lengths=torch.tensor([0]))
    write_records(path, join_samples([Samples(empty, token_columns(none))], tokenizer))
    assert read_tokens(path)[0].response_tokens == read_tokens(path)[0].token_texts == []
    write_records(path, Samples([]))
    assert read_rows(path) == []
    assert read_table(path).column_names == [
        *SAMPLE_COLUMNS,
        *TOKEN_COLUMNS,
    ]


def test_values_that_are_not_finite_and_odd_texts_come_back(tmp_path, tokenizer):
    batch = batch_of()
    batch.rollouts.log_probs[0, 0] = -math.inf  # type: ignore[index]
    batch.rollouts.init_log_probs[0, 1] = math.nan  # type: ignore[index]
    samples = join_samples([samples_of(batch, tokenizer)], tokenizer)
    odd = 'a \ud800 "b"\n\u2028\x00 测试 👩‍👩‍👧 \U0010ffff'
    samples.rows[0] = dataclasses.replace(samples.rows[0], response=odd, kl=math.inf)
    write_records(tmp_path / "step_00001.parquet", samples)
    tokens = read_tokens(tmp_path / "step_00001.parquet")[0]
    assert tokens.policy_log_probs is not None
    assert tokens.reference_log_probs is not None
    assert tokens.policy_log_probs[0] == -math.inf
    assert math.isnan(tokens.reference_log_probs[1])
    row = read_rows(tmp_path / "step_00001.parquet")[0]
    assert row.response == odd.replace("\ud800", "?")
    assert math.isnan(row.kl)


def test_a_kill_before_the_move_leaves_the_earlier_file(tmp_path, tokenizer):
    samples = join_samples([samples_of(batch_of(), tokenizer)], tokenizer)
    write_samples(tmp_path, 3, samples)
    path = rollout_files(tmp_path)[3]
    before = path.read_bytes()
    if (child := os.fork()) == 0:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_samples(tmp_path, 3, Samples(samples.rows[:1]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == before
    assert list(rollout_files(tmp_path)) == [3]
    assert len(list(path.parent.iterdir())) == 2, "the torn file"
    drop_later_samples(tmp_path, 3)
    assert list(path.parent.iterdir()) == [path]


def test_damage_and_other_versions_are_named(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "step_00001.parquet"
    other = records.VERSION + 1
    monkeypatch.setattr(records, "VERSION", other)
    samples = join_samples([samples_of(batch_of(), tokenizer)], tokenizer)
    write_records(path, samples)
    monkeypatch.undo()
    with raises_error(
        "samples.file.other_version", path, f"version {other}", f"version {records.VERSION}"
    ):
        read_rows(path)
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[: len(whole) // 2], b"x" * 1000):
        path.write_bytes(data)
        with raises_error("parquet.file.not_readable", path):
            read_rows(path)
    pq.write_table(pa.table({"step": [1]}), path)
    with raises_error("samples.file.other_version", path, "version None"):
        read_rows(path)


def test_the_view_prints_a_sample_a_line(tmp_path, tokenizer):
    batch = batch_of()
    batch.rollouts.log_probs[0, 0] = math.nan  # type: ignore[index]
    samples = join_samples([samples_of(batch, tokenizer)], tokenizer)
    write_samples(tmp_path, 3, samples)
    write_rows(tmp_path, 12, samples.rows[:1])
    run = RunFolder(tmp_path)
    stored = [json.loads(line) for line in run.sample_lines(3)]
    assert stored == [row.as_json() for row in samples.rows]
    plain = list(run.sample_lines())
    with_tokens = list(run.sample_lines(tokens=True))
    assert len(plain) == len(with_tokens) == 1
    lines = [json.loads(line) for line in run.sample_lines(3, tokens=True)]
    assert lines[0]["policy_log_probs"][0] is None
    assert len(lines[3]["token_kl"]) == 5
    with raises_error("samples.step.missing", tmp_path / "test", "step 0"):
        list(run.sample_lines(kind="test"))


def test_a_space_that_sentencepiece_drops_from_a_first_token_is_kept():
    class Pieces:
        def batch_decode(self, ids, **_):
            return ["the", " the", "er", "�"]

        def convert_ids_to_tokens(self, ids):
            return ["▁the", "▁the", "er", None]

    texts = records._texts(Pieces(), [1, 2, 3, 4])  # type: ignore[arg-type]
    assert texts == {1: " the", 2: " the", 3: "er", 4: "�"}


def test_the_columns_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text(encoding="utf-8")
    rows = [
        tuple(re.split(r" *\| *", line)[1:3])
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    types = column_types(RolloutRow) | column_types(SampleTokens)
    expected = [(f"`{name}`", str(kind).replace("item: ", "")) for name, kind in types.items()]
    first = rows.index(expected[0])
    assert rows[first : first + len(expected)] == expected


def test_a_row_as_json_has_no_nan():
    scores = {"a": math.nan, "b": 1.0}
    row = RolloutRow(1, 0, 0, "p", "r", math.nan, "stop", 1, source_rewards=scores)
    record = json.loads(json.dumps(row.as_json(), allow_nan=False))
    assert record["reward"] is None
    assert record["source_rewards"] == {"a": None, "b": 1.0}
    assert np.isnan(row.kl)


def row(prompt_id: int = 0, reward: float = 0.5, **changes) -> RolloutRow:
    base = RolloutRow(
        step=12,
        prompt_id=prompt_id,
        sample_id=0,
        prompt="Human: why?",
        response="because",
        reward=reward,
        finish_reason="stop",
        response_length=3,
    )
    return dataclasses.replace(base, **changes)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [
        row(
            1,
            0.1 + 0.2,
            kl=1.5,
            reward_with_kl=0.2,
            baseline=-0.1,
            advantage=0.3,
            sample_id=1,
            shaped_reward=1 / 3,
        ),
        row(
            2,
            response='line one\nline "two" \u2028 separated \x85 测试 \\',
            finish_reason="length",
            valid=False,
        ),
        row(
            3,
            math.nan,
            response="",
            response_length=0,
            source_rewards={"a/b": 0.25, "ü": math.nan},
            score_fault="no",
        ),
    ]
    path = write_rows(tmp_path, 12, rows)
    assert path == tmp_path / "rollouts" / "step_00012.parquet"
    back = read_rows(path)
    assert back[0] == rows[0]
    assert back[1].response == rows[1].response
    assert not back[1].valid
    assert not back[1].is_end
    assert math.isnan(back[1].kl)
    assert back[1].score_fault is None
    assert back[1].source_rewards == {}
    assert math.isnan(back[2].reward)
    assert back[2].response == ""
    assert back[2].score_fault == "no"
    assert back[2].source_rewards["a/b"] == 0.25
    assert math.isnan(back[2].source_rewards["ü"])


def test_failed_rewards_are_null_on_disk_and_tensors_are_numbers(tmp_path):
    rows = [row(0, math.nan), row(1, torch.tensor(0.25))]  # type: ignore[arg-type]
    path = write_rows(tmp_path, 1, rows, kind="validation")
    assert path == tmp_path / "validation" / "step_00001.parquet"
    records = read_table(path, list(SAMPLE_COLUMNS)).to_pylist()
    assert records[0]["reward"] is None
    assert records[1]["reward"] == 0.25
    expected = [field.name for field in dataclasses.fields(RolloutRow)]
    assert list(records[0]) == expected
    assert math.isnan(read_rows(path)[0].reward)


@pytest.mark.parametrize("name", ["reward", "record", "weight_versions"])
def test_a_column_that_is_missing_is_named(tmp_path, name):
    path = write_rows(tmp_path, 1, [row(record='{"limit": 80}')])
    assert read_rows(path)[0].record == '{"limit": 80}'
    pq.write_table(pq.read_table(path).drop_columns(name), path)
    with raises_error("samples.columns.missing", path, f"['{name}']"):
        read_table(path)


def test_a_lone_surrogate_in_a_prompt_does_not_end_the_run(tmp_path):
    path = write_rows(tmp_path, 1, [row(prompt="a \ud800 b")])
    assert read_rows(path)[0].prompt == "a ? b"


def test_a_step_written_again_replaces_its_file(tmp_path):
    write_rows(tmp_path, 3, [row(1), row(2)])
    path = write_rows(tmp_path, 3, [row(7)])
    prompt_ids = [r.prompt_id for r in read_rows(path)]
    assert prompt_ids == [7]
    names = [p.name for p in path.parent.iterdir()]
    assert names == ["step_00003.parquet"]


def test_resume_removes_the_files_of_later_steps(tmp_path):
    for step in (0, 5, 10):
        write_rows(tmp_path, step, [row()], "validation")
        write_rows(tmp_path, step, [row()])
    (tmp_path / "rollouts" / ".step_00003.parquet.x1").touch()  # of a kill
    assert list(rollout_files(tmp_path)) == [0, 5, 10]
    drop_later_samples(tmp_path, 5)
    assert list(rollout_files(tmp_path)) == list(rollout_files(tmp_path, "validation")) == [0, 5]
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


def test_files_are_in_the_order_of_their_steps(tmp_path):
    for step in (100000, 99999, 2):
        write_rows(tmp_path, step, [row()])
    assert list(rollout_files(tmp_path)) == [2, 99999, 100000]
    assert rollout_files(tmp_path, "validation") == {}


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "absent.parquet"
    with raises_error("samples.file.missing", path):
        read_rows(path)


def test_a_file_of_an_earlier_version_names_both_versions(tmp_path):
    path = tmp_path / "rollouts" / "step_00001.parquet"
    write_records(path, Samples([row()], None))
    table = pq.read_table(path)
    earlier = table.replace_schema_metadata(
        {records.FORMAT: json.dumps({"version": records.VERSION - 1})}
    )
    pq.write_table(earlier, path)
    versions = (f"version {records.VERSION - 1};", f"version {records.VERSION}.")
    with raises_error("samples.file.other_version", path, *versions):
        read_rows(path)
