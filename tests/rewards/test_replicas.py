"""Several servers of one reward model: how requests are spread, and how failures are handled."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from contextlib import ExitStack

import pytest
from helpers.errors import raises_error
from helpers.fake_reward_server import FakeRewardServer, answer, describe
from helpers.rewards import request_of
from helpers.serve_toy_scorer import toy_score, toy_scores
from helpers.toy_server import free_port, wait_for

from reinforce_rl.rewards import transport
from reinforce_rl.rewards.client import RemoteGPTRMClient, Replicas
from reinforce_rl.rewards.transport import Call, FailedAttempt, ModelAddress
from reinforce_rl.rewards.wire import ENVELOPE_BYTES, ServerInfo
from reinforce_rl.utils.net import Address

pytest.importorskip("tritonclient.http")

SEQUENCES = [[row % 50 + 4, row % 7 + 4, row % 3 + 4][: 1 + row % 3] for row in range(60)]


@pytest.fixture
def world():
    """Makes servers that score, and clients of their ports; all are closed after the test."""
    with ExitStack() as stack:

        def serve(port: int = 0, **options) -> FakeRewardServer:
            return stack.enter_context(
                FakeRewardServer(port=port, **{"score": toy_score, **options})
            )

        def connect(*ports: int, **options) -> RemoteGPTRMClient:
            options = {
                "first_backoff_seconds": 0.02,
                "max_backoff_seconds": 0.2,
                "deadline_seconds": 30.0,
                **options,
            }
            places = [Address("127.0.0.1", port) for port in ports[1:]]
            client = RemoteGPTRMClient(port=ports[0], replicas=places, **options)
            stack.callback(client.close)
            return client

        yield serve, connect


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":5555", "host:0", "host:65536", "host:x", "http://host:1", "a@h:1"],
)
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError, match="not HOST:PORT"):
        Address.parse(text)


def test_addresses():
    assert Address.parse("rm-2.cluster:5555") == Address("rm-2.cluster", 5555)
    assert Address.parse("[::1]:80") == Address("::1", 80)
    assert str(Address("::1", 80)) == "[::1]:80"


def test_the_parts_of_a_request_are_spread_and_joined_in_order(world):
    serve, connect = world
    servers = [serve(), serve(), serve()]
    client = connect(*(server.port for server in servers))
    client.wait_until_ready()
    for server in servers:
        server.gate.clear()
    future = client.infer_rm(request_of(SEQUENCES))  # eight parts of at most eight
    # Six threads for three servers: each server has two parts before any has answered.
    assert wait_for(lambda: [server.calls for server in servers] == [2, 2, 2], 60)
    for server in servers:
        server.gate.set()
    assert future.result().values.tolist() == toy_scores(SEQUENCES)
    parts = [part for server in servers for part in server.requests]
    expected_parts = [SEQUENCES[start : start + 8] for start in range(0, 60, 8)]
    assert sorted(parts) == sorted(expected_parts)


def test_the_least_busy_server_is_asked(world):
    """Busy by samples, not by requests."""
    serve, connect = world
    servers = [serve(), serve()]
    client = connect(*(server.port for server in servers), max_in_flight=4)
    client.wait_until_ready()
    for server in servers:
        server.gate.clear()
    futures = [client.infer_rm(request_of(SEQUENCES[:8]))]
    assert wait_for(lambda: sum(server.calls for server in servers) == 1, 60)
    busy, idle = sorted(servers, key=lambda server: -server.calls)
    for number in range(1, 5):
        futures.append(client.infer_rm(request_of(SEQUENCES[:1])))
        assert wait_for(lambda number=number: idle.calls == number, 60)
    assert busy.calls == 1
    for server in servers:
        server.gate.set()
    scores = [future.result().values.tolist() for future in futures]
    assert scores[0] == toy_scores(SEQUENCES[:8])
    assert scores[1:] == [toy_scores(SEQUENCES[:1])] * 4


def test_the_first_request_of_many_clients_does_not_go_to_one_server(world):
    serve, connect = world
    servers = [serve(), serve()]
    for _ in range(12):
        ports = (server.port for server in servers)
        connect(*ports).infer_rm(request_of([[5]])).result()
    assert sum(server.calls for server in servers) == 12
    assert min(server.calls for server in servers) > 0  # by chance 0 once in 2,048 times


def test_a_run_goes_on_while_one_lives_and_the_other_is_taken_back(world):
    serve, connect = world
    first = serve()
    port = free_port()
    with FakeRewardServer(port=port, score=toy_score) as second:
        client = connect(first.port, port)
        client.wait_until_ready()
        while not (first.calls and second.calls):
            client.infer_rm(request_of(SEQUENCES[:8])).result()
    start = time.monotonic()
    for _ in range(5):
        rewards = client.infer_rm(request_of(SEQUENCES)).result()
        assert rewards.values.tolist() == toy_scores(SEQUENCES)
    assert time.monotonic() - start < 15  # far from the deadline
    missing = client.missing()
    assert any(f"127.0.0.1:{port} does not answer" in text for text in missing)
    again = serve(port)

    def is_asked_again() -> bool:
        client.infer_rm(request_of([[5]])).result()
        return again.calls > 0

    assert wait_for(is_asked_again, 60)
    assert client.missing() == []


def test_a_busy_server_leaves_its_requests_to_the_other(world):
    """The busy server asks for a minute; the client does not wait."""
    serve, connect = world
    busy = serve(score=None, answers=[(503, {"error": "busy"}, {"Retry-After": "60"})])
    other = serve()
    client = connect(busy.port, other.port)
    client.wait_until_ready()
    for _ in range(4):
        rewards = client.infer_rm(request_of(SEQUENCES)).result()
        assert rewards.values.tolist() == toy_scores(SEQUENCES)
    assert 1 <= busy.calls <= 4  # once for each part in flight at that time


def test_the_pause_of_a_server_that_never_scores_grows(world):
    serve, connect = world
    broken = serve(score=None, answers=[(500, {"error": "ouch"})])
    other = serve()
    client = connect(broken.port, other.port, first_backoff_seconds=0.2, max_backoff_seconds=60.0)
    client.wait_until_ready()
    times: list[float] = []
    while len(times) < 4:
        client.infer_rm(request_of([[5]])).result()
        times += [time.monotonic()] * (broken.calls - len(times))
        time.sleep(0.02)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    for gap, pause in zip(gaps, (0.2, 0.4, 0.8), strict=True):
        assert gap > 0.4 * pause, gaps


def test_without_any_server_the_deadline_names_all(world):
    _, connect = world
    ports = free_port(), free_port()
    said: list[str] = []
    client = connect(*ports, deadline_seconds=1.0, on_wait=said.append, wait_report_seconds=0.2)
    with raises_error("reward_server.server.no_answer", "1 s") as caught:
        client.infer_rm(request_of([[5]])).result()
    for port in ports:
        assert f"127.0.0.1:{port} does not answer (connection refused)" in str(caught.value)
        assert any(
            f"127.0.0.1:{port} does not answer (connection refused)" in text for text in said
        )
    assert said[-1].startswith("reward servers: ")
    assert "; retrying, " in said[-1]


def test_a_wait_for_all_of_them_ends_when_one_comes(world):
    serve, connect = world
    ports = free_port(), free_port()
    future = connect(*ports).infer_rm(request_of(SEQUENCES))
    time.sleep(0.3)
    assert not future.done()
    serve(ports[1])
    assert future.result().values.tolist() == toy_scores(SEQUENCES)


def test_one_may_be_down_at_the_start_and_is_checked_when_it_comes(world):
    serve, connect = world
    up = serve()
    port = free_port()
    client = connect(port, up.port)
    assert client.wait_until_ready().name == "reward_model"
    assert client.missing() == [
        f"The reward server at 127.0.0.1:{port} does not answer (connection refused)."
    ]
    late = serve(port)
    late.info = describe(details={"head_sha256": "other"})
    places = [f"127.0.0.1:{up.port}", f"127.0.0.1:{port}"]
    with raises_error("reward_server.replicas.differ", *places, "head_sha256"):
        while True:
            client.infer_rm(request_of([[5]])).result()
    assert late.calls == 0


def test_two_different_models_at_the_start(world):
    serve, connect = world
    servers = [serve(), serve()]
    servers[1].info = describe(max_batch_size=4)
    places = [f"127.0.0.1:{server.port}" for server in servers]
    with raises_error("reward_server.replicas.differ", *places) as caught:
        connect(*(server.port for server in servers)).wait_until_ready()
    assert re.search(r"max_batch_size: \d at 127.0.0.1:\d+", str(caught.value))


def test_a_replica_that_becomes_another_model_ends_the_run(world):
    serve, connect = world
    first = serve()
    second = serve()
    client = connect(first.port, second.port)
    client.wait_until_ready()
    second.info = describe(details={"head_sha256": "new"})
    second.score = None
    second.answers = [(503, {})]
    with raises_error("reward_server.server.replaced", f"127.0.0.1:{second.port}"):
        for _ in range(1000):
            client.infer_rm(request_of(SEQUENCES)).result()


def test_a_wrong_token_at_one_of_two_is_an_error_at_the_start_and_not_later(world):
    """A server that rejects the token later counts as down while the other one answers."""
    serve, connect = world
    first = serve()
    second = serve()
    client = connect(first.port, second.port)
    client.wait_until_ready()
    second.score = None
    second.answers = [(401, {"error": "no"})]
    second.info = describe(name="other")
    for _ in range(4):
        rewards = client.infer_rm(request_of(SEQUENCES)).result()
        assert rewards.values.tolist() == toy_scores(SEQUENCES)
    assert second.calls >= 1
    with raises_error("reward_server.model.other_name", "'other'", "'reward_model'"):
        connect(first.port, second.port).wait_until_ready()


def test_a_refused_request_fails_as_a_whole_and_alone(world):
    serve, connect = world
    answers = [(400, {"error": "no such input"}), answer([1.5], [0])]
    server = serve(score=None, answers=answers)
    client = connect(server.port, max_in_flight=1)
    first = client.infer_rm(request_of(SEQUENCES))
    second = client.infer_rm(request_of([[5]]))
    with raises_error("reward_server.request.refused", "HTTP 400: no such input"):
        first.result()
    assert second.result().values.tolist() == [1.5]
    assert server.calls == 2  # its other parts were not sent


def test_close_ends_what_waits_and_what_is_under_way(world):
    serve, connect = world
    server = serve()
    server.gate.clear()
    client = connect(server.port, free_port())
    futures = [client.infer_rm(request_of(SEQUENCES)) for _ in range(3)]
    assert wait_for(lambda: server.calls > 0, 60)
    client.close()
    client.close()
    for future in futures:
        with raises_error("reward_server.client.closed"):
            future.result()
    with raises_error("reward_server.client.closed"):
        client.infer_rm(request_of([[1]]))
    server.gate.set()
    threads = threading.enumerate()
    left = [thread.name for thread in threads if str(server.port) in thread.name]
    assert wait_for(lambda: not left, 1), left


def test_what_is_sent_stays_within_the_servers_limit(world):
    """The estimate of a request's size is at least the real size."""
    serve, connect = world
    server = serve()
    server.info = describe(max_batch_size=256, max_request_bytes=ENVELOPE_BYTES + 10 * 32)
    rewards = connect(server.port).infer_rm(request_of(SEQUENCES)).result()
    assert rewards.values.tolist() == toy_scores(SEQUENCES)
    assert [len(part) for part in server.requests] == [10] * 6
    largest = max(int(headers["Content-Length"]) for headers in server.headers)
    assert largest <= ENVELOPE_BYTES + 10 * 32


@pytest.fixture
def replicas(monkeypatch) -> Replicas:
    """One server, which is up at each health check."""

    async def describe_it(model: ModelAddress, seconds: float) -> ServerInfo:
        return ServerInfo(model.name, 8, 8, 8, None, deterministic=True, add_special_tokens=False)

    monkeypatch.setattr(transport, "ask_description", describe_it)
    address = ModelAddress(Address("127.0.0.1", 1), "rm", None)
    return Replicas([address], 0.01, 0.01, None, 60.0)


def test_a_failure_from_before_a_server_came_back_does_not_set_it_aside(replicas):
    call = Call("x", 60.0)

    async def fail(when: asyncio.Event) -> None:
        with pytest.raises(FailedAttempt):
            async with replicas.lease(1, call):
                await when.wait()
                raise FailedAttempt("failed")

    async def play() -> None:
        soon = asyncio.Event()
        late = asyncio.Event()
        first = asyncio.create_task(fail(soon))
        second = asyncio.create_task(fail(late))
        async with replicas.lease(1, call):
            while replicas._replicas[0].outstanding < 3:
                await asyncio.sleep(0.01)
        soon.set()
        await first
        assert replicas.troubles() == ["failed"]
        async with replicas.lease(1, call):  # it is back
            pass
        late.set()
        await second

    asyncio.run(play())
    assert replicas.troubles() == []


def test_what_is_cancelled_as_a_server_changes_ends(replicas):
    async def play() -> bool:
        waiting = asyncio.create_task(replicas._wait(lambda: None, Call("x", 60.0)))
        await asyncio.sleep(0.1)
        replicas._wake()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=30.0)
        return waiting.cancelled()

    assert asyncio.run(play())
