"""Evaluation of tiny models: the trainer's and transformers' numbers, and likely mistakes."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.errors import check_fault, printed_keys, raises_error
from helpers.fake_judge import FakeJudge
from helpers.models import tiny_llama_folder
from helpers.tiny_run import metrics_of, tiny_config, tiny_overrides, tiny_trainer
from rich.console import Console

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.evaluation.evaluate import evaluate
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.rewards.judge import Judge
from reinforce_rl.rewards.sources import connect_to_reward_servers

SHORT = ("model.reinforce.length_params.max_length=5",)
SHARE = ("helpers.reward_functions.share_of_letters",)
LETTERS = "etaoinshr"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, and prompts whose lines name the good letters."""
    folder = tmp_path_factory.mktemp("evaluation")
    tiny_overrides(folder)
    tiny_llama_folder(
        folder / "other", vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=16, seed=5
    )
    lines = [
        {"prompt": LETTERS[i % 9] + LETTERS[(2 * i) % 9], "letters": LETTERS[i % 4 :: 4]}
        for i in range(12)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.more
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "drawn"])
def test_the_mean_reward_equals_the_trainers_validation_before_step_1(
    folder: Path, tmp_path: Path, sampled
) -> None:
    how = [f"model.reinforce.val_sampling_params.use_greedy={not sampled}", *SHORT]
    how += [
        "reward=function",
        f"reward_function.name={SHARE[0]}",
        "+reward_function.kwargs.scale=0.7",
    ]
    places = [
        f"model.data.data_prefix.{split}={folder / 'data.jsonl'}"
        for split in ("train", "validation")
    ]
    steps = ["trainer.reinforce.max_steps=1", "trainer.reinforce.val_check_interval=1"]
    cfg = tiny_config(
        tmp_path,
        *how,
        *places,
        *steps,
        f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
    )
    with parallel_mesh() as mesh:
        source = connect_to_reward_servers(
            cfg, mesh, load_tokenizer(folder / "model"), SilentMonitor(tmp_path)
        )
        try:
            with tiny_trainer(cfg, mesh, source) as trainer:
                trainer.fit()
        finally:
            source.close()
    expected = metrics_of(tmp_path)[0]
    assert expected["step"] == 0
    assert 0 < expected["val/rewards"] < 0.7
    evaluation = evaluate(
        [folder / "model"], folder / "data.jsonl", overrides=how, out=tmp_path / "out"
    )
    (model,) = evaluation.models
    for name, value in model.metrics.items():
        assert value == expected[f"val/{name}"], name
    assert model.numbers["reward"].mean == expected["val/rewards"]
    run = RunFolder(tmp_path / "out" / "model")
    rows = run.samples(0, "validation")
    assert run.series("val/rewards") == [(0, expected["val/rewards"])]
    rewards = [row.reward for row in rows]
    error = statistics.stdev(rewards) / math.sqrt(len(rows))
    assert model.numbers["reward"].standard_error == pytest.approx(error)
    expected = statistics.fmean(row.response_length for row in rows)
    assert model.numbers["length"].mean == expected


@pytest.mark.more
def test_models_are_compared_by_prompt_and_twice_gives_the_same_file(
    folder: Path, tmp_path: Path
) -> None:
    texts = []
    for name in ("first", "second"):
        models = [folder / "model", folder / "other", folder / "model"]
        evaluation = evaluate(
            models,
            folder / "data.jsonl",
            rewards=SHARE,
            samples=4,
            overrides=SHORT,
            out=tmp_path / name,
        )
        texts.append((tmp_path / name / "results.json").read_text())
    assert texts[0] == texts[1]
    names = [model.name for model in evaluation.models]
    assert names == ["model", "other", "model-2"]
    read = {
        name: RunFolder(tmp_path / "second" / name).samples(0, "validation")
        for name in ("model", "other")
    }
    means = {name: [0.0] * 12 for name in read}
    for name, rows in read.items():
        assert len(rows) == 48
        for row in rows:
            means[name][row.prompt_id] += row.reward / 4
    differences = [b - a for a, b in zip(means["model"], means["other"], strict=True)]
    other, same = evaluation.comparisons
    assert other.model == "other"
    assert other.baseline == "model"
    assert other.by == "reward"
    assert other.difference is not None
    assert same.difference is not None
    assert other.difference.mean_difference == pytest.approx(statistics.fmean(differences))
    expected = statistics.stdev(differences) / math.sqrt(12)
    assert other.difference.standard_error == pytest.approx(expected)
    expected = sum(d > 1e-9 for d in differences)
    assert other.wins.wins == expected
    expected = sum(d < -1e-9 for d in differences)
    assert other.wins.losses == expected
    assert same.wins.ties == 12
    assert same.difference.mean_difference == 0.0, "the same model draws the same samples"
    read_back = json.loads(texts[0])
    first = read_back["comparisons"][0]
    assert first["win_rate"] == other.wins.rate
    assert first["prompts"] == 12
    assert first["difference"] == other.difference.mean_difference
    assert first["p"] == other.difference.p
    assert first["smallest_gain"] == other.difference.smallest_gain
    assert first["sentence"] == other.difference.sentence()
    assert read_back["comparisons"][1]["p"] is None, (
        "there is nothing to test where all differences are 0"
    )
    assert "pass@4" not in evaluation.models[0].numbers, (
        "rewards between 0 and 1 are not right or wrong"
    )
    console = Console(width=160, record=True, file=(tmp_path / "table").open("w"))
    console.print(evaluation.table())
    said = " ".join(console.export_text().split())
    assert "other against model, by reward: wins" in said
    assert "on the same 12 prompts (p " in said
    assert "+0.000 ± 0.000 on the same 12 prompts: all differences are equal" in said


@pytest.mark.more
def test_the_kl_equals_transformers_and_is_zero_from_itself(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    data = folder / "data.jsonl"
    out = tmp_path / "out"
    how = {
        "reference": folder / "other",
        "temperature": 0.8,
        "samples": 2,
        "overrides": SHORT,
        "out": out,
    }
    evaluation = evaluate([folder / "model", folder / "other"], data, **how)
    assert evaluation.comparisons == []
    assert "reward" not in evaluation.models[0].numbers, "nothing was to be scored"
    assert evaluation.models[0].failures == {}
    assert evaluation.models[1].numbers["KL"].mean == 0.0
    models = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("model", "other")]
    tokenizer = load_tokenizer(folder / "model")
    rows = RunFolder(out / "model").samples(0, "validation")
    checked = []
    expected = []
    for row in rows:
        prompt = tokenizer.encode(row.prompt, add_special_tokens=False)
        response = (
            tokenizer.encode(row.response, add_special_tokens=False)
            + [tokenizer.eos_token_id] * row.is_end
        )
        if len(response) != row.response_length:
            # a special token in the middle, which the text omits
            continue
        checked.append(row.kl)
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            policy, reference = ((model(ids).logits[0] / 0.8).log_softmax(-1) for model in models)
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        tokens = ids[0, len(prompt) :]
        expected.append(float((policy - reference)[places, tokens].sum()))
    assert len(checked) >= 8
    assert checked == pytest.approx(expected, abs=1e-4)
    expected = statistics.fmean(row.kl for row in rows)
    assert evaluation.models[0].numbers["KL"].mean == pytest.approx(expected)


@pytest.mark.more
def test_right_answers_are_counted_and_a_failed_reward_counts_apart(
    folder: Path, tmp_path: Path
) -> None:
    """Lines 0 to 3 have no answer, so `gsm8k` fails there.

    No other response can contain the number 7.
    """
    lines = [{"prompt": "eta", **({"answer": "7"} if i > 3 else {})} for i in range(10)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = evaluate(
        [folder / "model"],
        data,
        rewards=["gsm8k"],
        samples=2,
        overrides=SHORT,
        out=tmp_path / "out",
    )
    (model,) = evaluation.models
    assert model.numbers["reward"].mean == 0.0
    assert model.numbers["reward"].count == 12
    assert model.numbers["pass@2"].mean == 0.0
    ((reason, count),) = model.failures.items()
    assert count == 8
    assert "KeyError" in reason
    results_file = tmp_path / "out" / "results.json"
    assert json.loads(results_file.read_text())["models"][0]["failures"] == {reason: 8}
    both = evaluate([folder / "model", folder / "other"], data, rewards=["gsm8k"], overrides=SHORT)
    (compared,) = both.comparisons
    assert compared.wins.count == 6
    assert compared.wins.failed == 4
    assert str(compared).endswith("; 4 left out, not scored on both sides")


def test_a_judge_says_which_is_better_and_what_it_cannot_judge_does_not_count(folder: Path) -> None:
    def reply(text: str):
        def part(title: str) -> str:
            rest = text.partition(f"[{title}]\n")[2]
            return rest.partition("\n\n[")[0].strip("\n")

        question = part("Question")
        first = part("Answer A")
        second = part("Answer B")
        if question.startswith("e"):
            return (400, {"error": "no"})
        return (
            "[[C]]"
            if first == second
            else "[[A]]"
            if (len(first), first) > (len(second), second)
            else "[[B]]"
        )

    with FakeJudge(reply) as fake:
        evaluation = evaluate(
            [folder / "model", folder / "other"],
            folder / "data.jsonl",
            judge=Judge(fake.url, "m", retries=0),
            overrides=SHORT,
        )
    (judged,) = evaluation.comparisons
    assert judged.by == "judge m"
    assert judged.difference is None
    expected = sum(i % 9 == 0 for i in range(12))
    assert judged.wins.failed == expected
    assert "HTTP 400" in str(judged.judgements[0])
    low, high = judged.wins.interval
    said = (
        "indistinguishable from noise"
        if low <= 0.5 <= high
        else "a significant preference at the 5 % level"
    )
    assert str(judged).endswith(f"ties: {said}; {judged.wins.failed} prompts without a result")
    assert judged.wins.count == 10
    expected = sum(value == 1.0 for value in judged.judgements.values())
    assert judged.wins.wins == expected


def test_what_cannot_be_evaluated_is_reported_before_a_model_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    model = folder / "model"
    data = folder / "data.jsonl"

    def faults(*models: Path, **how) -> list[str]:
        with pytest.raises(ConfigError) as raised:
            evaluate(models, **{"data": data, "overrides": SHORT, **how})
        return raised.value.faults

    check_fault(faults(model, data=None), "eval.prompts.none_given", "--data", "--like")
    (absent,) = faults(model, data="/nowhere.jsonl")
    assert absent.startswith("model.data.data_prefix.va")
    (misspelt,) = faults(model, rewards=["gsm8"])
    assert "reinforce_rl.rewards.functions.gsm8k" in misspelt
    no_port = faults(model, rewards=["http://localhost"])
    expected = ["http://localhost:", "http://HOST:PORT", "http://HOST:PORT/NAME"]
    check_fault(no_port, "eval.reward.no_address", *expected)
    greedy = faults(model, samples=2, temperature=0.0)
    check_fault(greedy, "eval.samples.all_alike", 2, "greedy")
    check_fault(faults(), "eval.model.none_given")
    check_fault(faults(model, samples=0), "eval.samples.out_of_range", "samples is 0", 1)
    for temperature in (-1.0, math.inf):
        named = f"temperature is {temperature}"
        check_fault(
            faults(model, temperature=temperature), "eval.temperature.out_of_range", named, "greedy"
        )
    no_model = faults(model, judge=Judge("http://localhost/v1", ""))
    check_fault(no_model, "eval.judge.invalid", "judge", "model")
    stranger = tiny_llama_folder(tmp_path / "stranger", vocab_size=40, max_positions=16)
    other = faults(model, reference=stranger)
    check_fault(other, "eval.reference.tokenizer_differs", model, "vocabulary", 32, 40)
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "eta"}\n{"prompt": "etaoinshretaoin"}\n')
    skip = [*SHORT, "model.data.too_long=skip"]
    too_long = faults(model, model, data=long, overrides=skip)
    check_fault(too_long, "eval.prompts.no_room", model, 1, "model.encoder_seq_length")


@pytest.mark.more
def test_rewards_by_name_and_address_are_sources_of_their_own(folder: Path) -> None:
    functions = [
        "+reward_function.more_functions.length.kwargs.target=3",
        "reward_function.weight=2",
    ]
    functions += [
        "+reward_function.more_functions.length.kwargs.tolerance=10",
        "+reward_function.kwargs.scale=1.0",
    ]
    units = "+reward_function.more_functions.length.kwargs.unit=characters"
    given = []
    evaluation = evaluate(
        [folder / "model"],
        folder / "data.jsonl",
        rewards=[*SHARE, "length"],
        overrides=[*SHORT, *functions, units],
        start=lambda *ranks: given.append(ranks),
    )
    numbers = evaluation.models[0].numbers
    assert given == [(1, 1)]
    data = folder / "data.jsonl"
    sets = f"model.data.data_prefix.validation={{all: {data}, again: {data}}}"
    apart = evaluate([folder / "model"], rewards=SHARE, overrides=[*SHORT, sets]).models[0].numbers
    assert apart["reward of all"] == apart["reward of again"]
    assert apart["reward of all"].mean == pytest.approx(apart["reward"].mean)
    total = 2 * numbers["reward/share_of_letters"].mean + numbers["reward/length"].mean
    assert numbers["reward"].mean == pytest.approx(total)
    with raises_error("reward_server.server.no_answer", "localhost:9"):
        evaluate(
            [folder / "model"],
            folder / "data.jsonl",
            rewards=["http://localhost:9/one"],
            overrides=[*SHORT, "remote_rm.ready_timeout_seconds=1"],
        )


@pytest.mark.slow
def test_the_command_on_two_ranks_finds_what_one_does(folder: Path, tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    paths = f"{tests.parent}{os.pathsep}{tests}"
    words = [
        "eval",
        str(folder / "model"),
        str(folder / "other"),
        "--data",
        str(folder / "data.jsonl"),
        *SHORT,
    ]
    words += ["--reward", *SHARE, "--reference", str(folder / "other"), "--samples=2"]
    results_of_runs = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        command = [
            sys.executable,
            "-m",
            "reinforce_rl",
            *words,
            f"--out={out}",
            f"trainer.devices={ranks}",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "other against model, by reward: wins" in done.stdout
        results_of_runs.append(json.loads((out / "results.json").read_text()))
        assert len(RunFolder(out / "other").samples(0, "validation")) == 24
    for model, model_on_two in zip(
        *(results["models"] for results in results_of_runs), strict=True
    ):
        for name, number in model["numbers"].items():
            assert model_on_two["numbers"][name]["mean"] == pytest.approx(
                number["mean"], abs=1e-4
            ), name
            assert model_on_two["numbers"][name]["count"] == 24
    command = [sys.executable, "-m", "reinforce_rl", "eval", "nowhere", "--reward", "gsm8k"]
    environment = {**os.environ, "PYTHONPATH": paths}
    wrong = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert wrong.returncode == 1
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("error: ")
    assert "nowhere" in wrong.stderr
    assert printed_keys(wrong.stderr) == ["model.folder.no_model"]
