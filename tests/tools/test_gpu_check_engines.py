"""The checks of engines, with planted faults, on the native one and the fake TensorRT-LLM."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest
from helpers.engine_fake import install_fake, uninstalled_after

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from gpu_checks import engines  # noqa: E402
from gpu_checks.base import CPU, FAIL, PASS, SKIP, Context  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "groups": 2,
    "ffn": 64,
    "logit_scale": 2.0,
}


@pytest.fixture
def context(tmp_path, monkeypatch) -> Context:
    monkeypatch.setattr(engines, "MODEL", SMALL)
    return Context(CPU, tmp_path, time.time() + 300)


@pytest.mark.more
def test_an_engine_with_log_probs_of_what_it_drew_from(context):
    with uninstalled_after():
        install_fake(context.folder / "engine")
        finding = engines.check_tensorrt_llm(context)
    assert finding.verdict == PASS, finding.sentence
    cold = finding.numbers["gaps"][1]
    warm = finding.numbers["gaps"][0]
    assert warm["at it"] == warm["at 1"] < 1e-4
    assert cold["at it"] < 1e-4 < 0.1 < cold["at 1"]


def test_log_probs_at_temperature_1_are_told_from_others(context, monkeypatch):
    """As TorchSampler reports them by default (LogprobMode.RAW).

    Here transformers' two are exchanged instead.
    """
    reference = engines.reference_log_probs
    monkeypatch.setattr(engines, "engine_of", native_engine)
    monkeypatch.setattr(engines, "reference_log_probs", lambda *given: reference(*given)[::-1])
    finding = engines.check_tensorrt_llm(context)
    assert finding.verdict == FAIL
    assert finding.sentence == "temperature 0.6: log-probs are those at temperature 1"


engine_of = engines.engine_of


def native_engine(context: Context, *overrides: str):
    return engine_of(context, "generation=native")


def test_both_runners_are_asked_for_and_compared(context, monkeypatch):
    runners = []

    def native(context: Context, *overrides: str):
        assert overrides[:2] == ("generation=vllm", "vllm.enforce_eager=true")
        runners.append(engines.os.environ[engines.RUNNER])
        return native_engine(context)

    monkeypatch.setenv(engines.RUNNER, "")
    monkeypatch.setattr(engines, "engine_of", native)
    monkeypatch.setattr(engines, "is_installed", lambda name: True)
    finding = engines.check_vllm(context)
    assert finding.verdict == PASS, finding.sentence
    assert runners == ["0", "1"]
    assert [row["runner"] for row in finding.numbers["gaps"]] == [1, 1, 2, 2]
    assert finding.numbers["equal responses of both"] == len(engines.PROMPTS)


def test_without_vllm_there_is_nothing_to_say(context, monkeypatch):
    monkeypatch.setattr(engines, "ENGINE_PYTHON", context.folder / "none")
    monkeypatch.setattr(engines, "is_installed", lambda name: False)
    assert engines.check_vllm(context).verdict == SKIP


def test_log_probs_that_are_not_reported_are_a_fault():
    rows = [{"temperature": 0.6, "at it": math.nan, "at 1": math.nan, "runner": 2}]
    (fault,) = engines.faults_of(rows)
    assert fault.startswith("runner 2, temperature 0.6: log-probs differ")
