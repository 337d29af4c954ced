"""The benchmark of the papers' findings: its reward, its sums, and its quick form."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import tiny_llama_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from findings.charts import Curve, Panel, Point, figure  # noqa: E402
from findings.language import (  # noqa: E402
    SCALE,
    all_prompts,
    raw_score,
    reward,
    vocabulary,
    write_review,
)
from findings.runs import (  # noqa: E402
    CELLS,
    LAGGING,
    SAMPLES_PER_STEP,
    Job,
    Outcome,
    ReviewReward,
    configuration,
)
from findings.summary import Estimate, best_rates, difference, lag_rows  # noqa: E402

from reinforce_rl.rewards.base import RewardRequest  # noqa: E402


@pytest.mark.parametrize(
    ("review", "score"),
    [
        ("", 0.0),
        ("the look was good .", 1.0),
        ("the look was very perfect and the price was rather bad .", 3.0 - 0.75),
        ("the look was hardly awful .", 1.0),
        ("the look was good and the look was nice .", 1.0),  # the aspect is repeated
        ("the look was good and the price was good .", 1.0),  # the adjective is repeated
        # the third does not count
        ("the look was good and the price was nice and the end was superb .", 2.0),
        ("good perfect superb", 0.0),  # no clause
        ("the look was very", 0.0),
        ("the perfect was good .", 0.0),
    ],
)
def test_reward_of_reviews(review, score):
    assert raw_score(review.split()) == score
    assert reward(review) == score / SCALE


def test_grammar_has_the_mean_and_the_deviation_that_the_cells_are_made_for():
    source = random.Random(3)
    prompts = all_prompts()
    words = set(vocabulary())
    assert len(prompts) == len(set(prompts)) == 360
    reviews = [write_review(prompt, source) for prompt in prompts for _ in range(10)]
    for text in [*prompts, *reviews]:
        assert set(text.split()) <= words
    rewards = [reward(text) for text in reviews]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    assert abs(mean) < 0.08
    assert deviation == pytest.approx(1.0, abs=0.05)


def scored(
    cell: str, prompts: tuple[str, ...], responses: tuple[str, ...], seed: int = 0
) -> list[float]:
    import torch

    nothing = torch.zeros(len(prompts), 1, dtype=torch.long)
    request = RewardRequest(nothing, nothing[:, 0], prompts, responses)
    return ReviewReward(CELLS[cell], seed).infer_rm(request).result().values.tolist()


def test_what_cells_add_to_the_reward():
    reviews = ("the look was good .", "the look was bad .") * 2
    prompts = ("i hated the soup .",) * 2 + ("i loved the soup .",) * 2
    plain = scored("rloo4", prompts, reviews)
    expected = [1 / SCALE, -1 / SCALE] * 2
    assert plain == pytest.approx(expected)
    expected = [value + 4 for value in plain]
    assert scored("vanilla_plus4", prompts, reviews) == pytest.approx(expected)
    added = [
        a - b for a, b in zip(scored("running_mean_spread2", prompts, reviews), plain, strict=True)
    ]
    assert added[0] == pytest.approx(added[1])  # of one prompt
    assert abs(added[0] - added[2]) > 0.01
    noisy = [scored("rloo4_noise2", prompts, reviews, seed) for seed in range(200)]
    noise = [a - b for row in noisy for a, b in zip(row, plain, strict=True)]
    assert math.sqrt(sum(n * n for n in noise) / len(noise)) == pytest.approx(2.0, rel=0.1)


def test_cells_draw_equally_many_samples_and_name_each_other():
    for cell in CELLS.values():
        assert SAMPLES_PER_STEP % cell.group == 0
        assert {*cell.against, cell.tuned_as or cell.name} <= CELLS.keys()
        assert CELLS[cell.tuned_as or cell.name].estimator == cell.estimator


def outcome(
    cell: str, seed: int, reward_at_end: float, kl: float = 0.0, lr: float = 1e-3
) -> Outcome:
    return Outcome(Job(cell, seed, lr), [(0, 0.0), (32, reward_at_end)], [0.0], [kl], 1.0)


def test_differences_are_taken_seed_by_seed():
    outcomes = {
        "rloo4": [outcome("rloo4", 1, 1.0), outcome("rloo4", 2, 5.0), outcome("rloo4", 3, 9.0)],
        "raft4": [outcome("raft4", 3, 9.5), outcome("raft4", 1, 0.5), outcome("raft4", 4, 100.0)],
    }
    estimate = difference(outcomes, "raft4", "rloo4", lambda o: o.final_reward)
    assert estimate == Estimate(0.0, 0.5, 2)  # -0.5 and 0.5: deviation sqrt(0.5), over sqrt(2)
    assert difference(outcomes, "raft4", "vanilla", lambda o: o.final_reward) is None


def test_rate_is_chosen_by_reward_less_beta_times_kl():
    outcomes = [
        outcome("rloo4", 1, 1.0, kl=0.0, lr=1e-3),
        outcome("rloo4", 1, 1.4, kl=10.0, lr=2e-3),  # 1.4 - 0.05 * 10 = 0.9
        outcome("rloo4", 1, 0.5, kl=0.0, lr=4e-3),
    ]
    assert best_rates(outcomes) == {"rloo4": 1e-3}


def test_cells_with_a_generator_differ_from_the_colocated_one_in_their_staleness_alone(tmp_path):
    tiny_llama_folder(tmp_path / "model", max_positions=32)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n')
    for base, *cells in LAGGING:
        plain = configuration(Job(base.name, 1, base.lr), tmp_path)
        assert plain.placement == "colocated"
        assert plain.staleness == 0
        for cell in cells:
            config = configuration(Job(cell.name, 1, cell.lr), tmp_path)
            assert config.placement == "disaggregated"
            assert config.training_ranks == 1
            assert config.staleness == cell.staleness
            correction = cell.correction or ("sequence" if cell.staleness else "none")
            assert config.trainer.reinforce.generator_correction == correction
            assert config.model.optim == plain.model.optim
            assert base.name in cell.against


def paced(
    cell: str, seed: int, values: tuple[float, ...], seconds: float, moved: float = 0.0
) -> Outcome:
    """Return a run with a validation of each value, one step apart."""
    validation = [(step * SAMPLES_PER_STEP, value) for step, value in enumerate(values)]
    nothing = [0.0] * (len(values) - 1)
    paces = [seconds] * len(nothing)
    drifts = [moved] * len(nothing)
    return Outcome(Job(cell, seed, 1e-3), validation, nothing, nothing, 1.0, paces, drifts, nothing)


def test_reward_after_some_seconds_lies_on_a_line_between_validations():
    outcome_of_run = paced("rloo4", 1, (0.0, 1.0, 3.0), 2.0)
    expected = [
        0.0,
        0.5,
        1.0,
        2.0,
        3.0,
        3.0,
    ]
    assert [
        outcome_of_run.reward_after(seconds) for seconds in (0.0, 1.0, 2.0, 3.0, 4.0, 9.0)
    ] == expected


def test_times_are_compared_at_half_of_the_colocated_run():
    base = LAGGING[0][0]
    cell = LAGGING[0][2]
    outcomes = {base.name: [], cell.name: []}
    for seed in (1, 2):
        steady = paced(base.name, seed, (0.0, 1.0, 2.0, 3.0, 4.0), 1.0)
        outcomes[base.name].append(steady)
        late = paced(cell.name, seed, (0.0, 1.0, 2.0, 3.0, 3.0 + seed), 0.5, 0.25)
        outcomes[cell.name].append(late)
    head, *rows = lag_rows(outcomes)
    assert len(head) == len(rows[0])
    expected = [
        [base.title, "2", "0", "0", "0.0%", "1.00 ± 0.00", "1.00", "2", "2.00 ± 0.00", ""],
        [
            cell.title,
            "2",
            "0",
            "0.25",
            "0.0%",
            "0.50 ± 0.00",
            "0.50",
            "4",
            "4.50 ± 0.50",
            "2.50 ± 0.50",
        ],
    ]
    assert rows == expected


def test_figure_is_well_formed():
    from xml.etree import ElementTree

    points = [Point(0, 0.0, 0.1), Point(32, 1.0, 0.2, 0.5)]
    curve = Curve("a < b", points)
    panels = [Panel("lines", "x", [curve]), Panel("bars", "x", [curve], bands=False)]
    root = ElementTree.fromstring(figure(panels))
    assert "a < b" in "".join(root.itertext())


def quick(folder: Path, *cells: str) -> tuple[str, list[dict]]:
    command = [
        sys.executable,
        BENCHMARKS / "papers_findings.py",
        "--quick",
        "--processes",
        "1",
        "--out",
        folder,
    ]
    done = subprocess.run(
        [*command, "--cells", *cells], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "quick" / "evaluation.jsonl").read_text().splitlines()
    summary_file = folder / "quick" / "summary.md"
    return summary_file.read_text(), [json.loads(line) for line in lines]


@pytest.mark.slow
def test_quick_form_runs_with_a_separate_generator(tmp_path):
    base, of_now, older = (cell.name for cell in LAGGING[2][:3])
    summary, lines = quick(tmp_path, base, of_now, older)
    assert CELLS[older].title in summary
    assert "of colocated" in summary
    for colocated, apart, one_old in zip(*[iter(lines)] * 3, strict=True):
        cells = [line["job"]["cell"] for line in (colocated, apart, one_old)]
        assert cells == [
            base,
            of_now,
            older,
        ]
        for name in ("validation", "training", "kl"):
            assert apart[name] == colocated[name]  # bit for bit
        assert one_old["training"][0] == colocated["training"][0]
        # the first two steps use the initial weights
        assert max(apart["moved"]) < 1e-9 < min(one_old["moved"][1:])
        assert len(one_old["steps"]) == 4


@pytest.mark.slow
def test_quick_form_runs_and_resumes(tmp_path):
    summary, first = quick(tmp_path, "rloo4", "vanilla_plus4")
    assert CELLS["vanilla_plus4"].title in summary
    summary, lines = quick(tmp_path, "rloo4", "vanilla_plus4", "raft4_noise2", "running_mean")
    assert lines[:4] == first
    cells = [line["job"]["cell"] for line in lines[4:]]
    assert cells == ["raft4_noise2", "running_mean"] * 2
    for line in lines:
        assert [samples for samples, _ in line["validation"]] == [0, 4 * SAMPLES_PER_STEP]
        same_seed = next(other for other in lines if other["job"]["seed"] == line["job"]["seed"])
        # the same weights, prompts and noise
        assert line["validation"][0] == same_seed["validation"][0]
        assert len(line["kl"]) == 4
        assert line["kl"][0] == pytest.approx(0.0, abs=1e-3)
    assert (tmp_path / "quick" / "curves.svg").stat().st_size > 1000
