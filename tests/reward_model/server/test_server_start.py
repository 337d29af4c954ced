"""What ends a reward server before it starts a process, and where its sockets are."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import psutil
import pytest
from helpers.errors import check_fault, raises_error
from helpers.serve_toy_scorer import VOCAB_SIZE, ToyScorer
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.reward_model.server.server import RewardServer
from reinforce_rl.reward_model.server.triton import make_home
from reinforce_rl.rewards.wire import INFO_MODEL
from reinforce_rl.utils.net import check_port

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_tiny_tokenizer(tmp_path / "tokenizer", vocab_size=VOCAB_SIZE))


def test_a_busy_port_is_an_error_before_anything_starts(tokenizer, monkeypatch):
    monkeypatch.setattr("reinforce_rl.utils.net.PORT_WAIT_SECONDS", 0.2)
    before = set(psutil.Process().children(recursive=True))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with raises_error("server.port.in_use", port, "127.0.0.1", "inference.port=N"):
            RewardServer(ToyScorer(0.0, 0.0), tokenizer, InferenceConfig(port=port)).serve()
    assert set(psutil.Process().children(recursive=True)) == before
    check_port("127.0.0.1", port)  # free again


def test_what_does_not_fit_the_model_is_named_together(tokenizer):
    class Small(ToyScorer):
        vocab_size = VOCAB_SIZE - 1

    with pytest.raises(ConfigError) as caught:
        RewardServer(Small(0.0, 0.0), tokenizer, InferenceConfig(name=INFO_MODEL))
    reserved, too_large = caught.value.faults
    check_fault([reserved], "serve.name.reserved", "inference.name", f"'{INFO_MODEL}'")
    check_fault([too_large], "serve.tokenizer.too_large", VOCAB_SIZE - 1, VOCAB_SIZE)
    with raises_error("server.port.not_listening", "no-such-host.invalid", "inference.host"):
        check_port("no-such-host.invalid", 5555)


def test_a_long_temporary_folder_does_not_break_the_sockets(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    home = make_home("reward_model")
    home.rmdir()
    assert home.parent == Path("/tmp")
    with raises_error("serve.name.too_long", "n" * 90):
        make_home("n" * 90)
    with raises_error("serve.name.characters", "../model"):
        make_home("../model")
