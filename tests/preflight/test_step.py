"""The cost model of `preflight=deep`: machines, collectives, engines and how a step is put together."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest
from helpers.errors import check_fault, raises_error
from helpers.public_configs import LLAMA_3_1_8B, LLAMA_3_1_70B

from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight import step
from reinforce_rl.preflight.rank import Cost, Traffic, total
from reinforce_rl.preflight.step import MACHINES, Engine, Lengths, load_machine

H100 = MACHINES["h100"]


def test_a_machine_of_a_file_is_a_known_one_with_other_numbers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: a100\nname: ours\nnetwork: 50e9\ngpus_per_node: 4\n")
    assert load_machine(str(path)) == MACHINES["a100"].model_copy(
        update={"name": "ours", "network": 50e9, "gpus_per_node": 4}
    )
    whole = "".join(f"{key}: {value!r}\n" for key, value in H100.model_dump().items())
    path.write_text(whole)
    assert load_machine(str(path)) == H100


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        (
            "base: h1000\n",
            "preflight.machine.unknown_base",
            ["base is 'h1000'", "h100, h200, a100"],
        ),
        ("- 1\n", "preflight.machine.no_keys", ["base: h100"]),
        ("a: [\n", "preflight.machine.not_yaml", ["line 2, column 1"]),
    ],
)
def test_a_file_that_is_no_machine_is_told_by_its_name(tmp_path, text, key, values):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with raises_error(key, f"preflight_machine={path}", *values):
        load_machine(str(path))


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("base: h100\nnetwrk: 5e10\n", "config.key.unknown", ["netwrk", "network"]),
        (
            "base: h100\nnetwork: fast\nhbm: -1\n",
            "config.value.wrong_type",
            ["network is 'fast'"],
        ),
        ("base: h100\nhbm: -1\n", "config.value.out_of_range", ["hbm is -1.0", 0]),
        ("name: mine\n", "config.value.not_set", ["memory"]),
        ("name: mine\n", "config.value.not_set", ["bf16"]),
    ],
)
def test_a_machine_file_that_cannot_be_used_is_told_by_key_and_file(tmp_path, text, key, values):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_machine(str(path))
    check_fault(raised.value.faults, key, *values, f"preflight_machine={path}")


def test_a_wrong_value_of_a_machine_is_told_once(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("".join(f"{key}: {value!r}\n" for key, value in {**H100.model_dump(), "memory": "much"}.items()))
    with pytest.raises(ConfigError) as raised:
        load_machine(str(path))
    (fault,) = raised.value.faults
    assert fault.startswith(f"preflight_machine={path}: ")
    check_fault([fault], "config.value.wrong_type", "memory is 'much'")


def test_an_unknown_machine_is_told():
    values = ("preflight_machine is 'b200'", "h100, h200, a100", "YAML")
    with raises_error("preflight.machine.unknown", *values):
        load_machine("b200")


def test_a_collective_is_a_ring_over_nvlink_or_over_every_card_of_a_node():
    gigabyte = 2.0**30
    inside = H100.collective_seconds("all_reduce", gigabyte, 8, 1)
    assert inside == pytest.approx(2 * 7 / 8 * gigabyte / (450e9 * 0.8) + 6 * 2.5e-6)
    one_card = H100.collective_seconds("reduce_scatter", gigabyte, 4, 4)
    assert one_card == pytest.approx(3 / 4 * gigabyte / 45e9 + 2 * 6e-6)
    # Eight ranks of a node have eight cards, which together are as fast as NVLink.
    assert H100.collective_seconds("all_reduce", gigabyte, 16, 2) == pytest.approx(
        2 * 15 / 16 * gigabyte / 360e9 + 8 * 6e-6
    )
    assert H100.collective_seconds("all_gather", gigabyte, 1, 1) == 0.0


def test_small_kernels_wait_for_their_launches_and_syncs():
    cost = Cost({"seconds": 1e-3, "kernels": 1000, "launches": 1000, "flops": 1e9, "bytes": 1e9, "syncs": 10})
    assert H100.seconds(cost) == pytest.approx(1000 * H100.launch + 10 * H100.sync)
    assert H100.bound(cost) == "launches"
    graph = dataclasses.replace(cost, counts={**cost.counts, "launches": 1, "syncs": 0})
    assert H100.seconds(graph) == 1e-3
    of = Traffic("data", "all_reduce", 8, 1)
    wire = Cost(calls={of: 2.0}, sent={of: 2e9})
    twice = total([(2, graph), (3, wire)])
    assert H100.wire_seconds(twice) == pytest.approx(6 * H100.collective_seconds("all_reduce", 1e9, 8, 1))
    assert H100.bound(twice) == "collectives"


@pytest.mark.parametrize(("mean", "longest"), [(350.7, 1024), (940.0, 3976), (900.0, 1024)])
def test_lengths_have_the_mean_and_the_longest_of_many_draws(mean, longest):
    lengths, draw = Lengths(longest, mean), random.Random(1)

    def one() -> float:
        return min(longest, draw.expovariate(1 / lengths.scale))

    assert statistics.fmean(one() for _ in range(40_000)) == pytest.approx(mean, rel=0.02)
    calls = [[max(one() for _ in range(8)) for _ in range(4)] for _ in range(2000)]
    steps, factor = lengths.of_slowest(8, 4, 8)
    assert steps == pytest.approx(statistics.fmean(map(statistics.fmean, calls)), rel=0.03)
    slowest = statistics.fmean(max(map(sum, calls[i : i + 8])) for i in range(0, 2000, 8))
    assert factor == pytest.approx(slowest / statistics.fmean(map(sum, calls)), rel=0.03)


def test_responses_of_one_length_keep_nobody_waiting():
    assert Lengths(128).of_slowest(64, 3, 16) == (128, 1.0)


@pytest.mark.parametrize(
    ("raw", "gpus", "context", "published"), [(LLAMA_3_1_8B, 1, 1000, 4.63e-3), (LLAMA_3_1_70B, 2, 1500, 18.91e-3)]
)
def test_a_decode_step_is_within_a_fifth_of_published_ones(monkeypatch, raw, gpus, context, published):
    """NVIDIA NIM 1.8, one request, see `decode_share`, chosen by them: this checks the form alone."""
    monkeypatch.setattr(step, "BF16", 1)
    engine = Engine(Architecture.from_hf(raw), H100, gpus, 1)
    assert engine.pass_seconds(1, 1, context) == pytest.approx(published, rel=0.2)


def test_an_engine_of_one_length_takes_its_steps_one_after_another():
    engine = Engine(Architecture.from_hf(LLAMA_3_1_8B), H100, 1, 64)
    seconds = engine.call_seconds(64, 64, 512, Lengths(256))
    steps = sum(engine.pass_seconds(64, 1, 512 + t + 0.5) for t in range(256))
    assert seconds == pytest.approx(steps + engine.pass_seconds(64, 512, 256), rel=1e-3)
    assert engine.call_seconds(128, 64, 512, Lengths(256)) > 1.9 * steps  # twice as many as it has slots
    assert engine.weight_bytes == 2 * 8_030_261_248
    assert math.isclose(engine.cache_bytes_of_token, 131_072)
