"""Machines of `preflight=deep`, by name and by file, and their least time for bytes and FLOPs."""

from __future__ import annotations

import pytest
from helpers.errors import check_fault, raises_error

from reinforce_rl.errors import ConfigError
from reinforce_rl.preflight.hardware import MACHINES, load_machine
from reinforce_rl.preflight.rank import Cost, Traffic, total

H100 = MACHINES["h100"]


def test_a_machine_of_a_file_is_a_known_one_with_other_numbers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: a100\nname: ours\nnetwork: 50e9\ngpus_per_node: 4\n")
    assert load_machine(str(path)) == MACHINES["a100"].model_copy(
        update={"name": "ours", "network": 50e9, "gpus_per_node": 4},
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
def test_a_file_that_is_no_machine_is_reported_by_its_name(tmp_path, text, key, values):
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
def test_a_machine_file_that_cannot_be_used_is_reported_by_key_and_file(
    tmp_path, text, key, values
):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_machine(str(path))
    check_fault(raised.value.faults, key, *values, f"preflight_machine={path}")


def test_a_wrong_value_of_a_machine_is_reported_once(tmp_path):
    path = tmp_path / "mine.yaml"
    values = {**H100.model_dump(), "memory": "much"}
    path.write_text("".join(f"{key}: {value!r}\n" for key, value in values.items()))
    with pytest.raises(ConfigError) as raised:
        load_machine(str(path))
    (fault,) = raised.value.faults
    assert fault.startswith(f"preflight_machine={path}: ")
    check_fault([fault], "config.value.wrong_type", "memory is 'much'")


def test_an_unknown_machine_is_reported():
    values = ("preflight_machine is 'b200'", "h100, h200, a100", "YAML")
    with raises_error("preflight.machine.unknown", *values):
        load_machine("b200")


GIGABYTE = 1e9


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "seconds"),
    [
        # In a sum each rank receives everything, in a gather only what it lacks.
        ("all_reduce", 8, 1, 1 / 450),
        ("broadcast", 8, 1, 1 / 450),
        ("all_gather", 8, 1, 7 / 8 / 450),
        ("reduce_scatter", 2, 1, 1 / 2 / 450),
        # Each rank has a network card: one rank a node has one, eight have eight.
        ("reduce_scatter", 4, 4, 3 / 4 / 50),
        ("all_gather", 16, 2, 1 / 2 / (8 * 50)),
        ("all_reduce", 16, 2, 1 / (8 * 50)),
        ("send", 2, 2, 1 / 50),
        ("send", 2, 1, 1 / 450),
        ("all_gather", 1, 1, 0.0),
    ],
)
def test_a_collective_takes_what_a_rank_must_receive_over_the_link(kind, ranks, nodes, seconds):
    assert H100.collective_seconds(kind, GIGABYTE, ranks, nodes) == pytest.approx(seconds)


def test_a_ring_of_the_data_sheets_rate_takes_no_less_than_the_bound():
    for kind, volume in (("all_reduce", 2.0), ("all_gather", 1.0), ("reduce_scatter", 1.0)):
        for ranks in (2, 4, 8):
            ring = volume * (ranks - 1) / ranks * GIGABYTE / H100.nvlink
            assert H100.collective_seconds(kind, GIGABYTE, ranks, 1) <= ring


def test_collectives_of_a_cost_are_summed_and_those_of_objects_take_nothing():
    traffic = Traffic("data", "all_reduce", 8, 1)
    objects = Traffic("all", "all_gather_object", 8, 1)
    cost = Cost(calls={traffic: 2.0, objects: 5.0}, sent={traffic: 2 * GIGABYTE, objects: 0.0})
    assert H100.wire_seconds(total([(3, cost)])) == pytest.approx(6 / 450)


def test_products_take_the_rate_of_their_type():
    cost = Cost({"flops": 3e12, "fp32_flops": 1e12})
    expected = 2 / 989.4 + 1 / 66.9
    assert H100.flop_seconds(cost) == pytest.approx(expected)
    assert H100.flop_seconds(Cost()) == 0.0


def test_of_each_pass_over_memory_the_cache_may_hold_some():
    assert H100.memory_seconds(GIGABYTE, 0) == pytest.approx(1 / 3350)
    assert H100.memory_seconds(GIGABYTE, 4) == pytest.approx(0.8 / 3350)
    assert H100.memory_seconds(GIGABYTE, 40) == 0.0
