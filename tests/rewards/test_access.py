"""Where the access token comes from, and what it is compared with."""

from __future__ import annotations

import pytest

from reinforce_rl.errors import ConfigError
from reinforce_rl.reward_server.options import access_faults
from reinforce_rl.rewards.wire import TOKEN_VARIABLE, bearer, is_authorised, read_token
from reinforce_rl.utils.ports import is_loopback

TOKEN = "a-token-of-24-characters"


def test_the_file_comes_before_the_environment(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    environment = {TOKEN_VARIABLE: "another-token-altogether"}
    assert read_token(path, "key", environment) == TOKEN
    assert read_token(None, "key", environment) == "another-token-altogether"
    assert read_token(None, "key", {}) is None
    assert read_token(None, "key", {TOKEN_VARIABLE: " "}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"the key: others may use .*mode {mode:04o}.*chmod 600"):
        read_token(path, "the key")


@pytest.mark.parametrize("text", ["", "short", "with a space in its middle", "ünicode-ünicode-ünicode"])
def test_what_cannot_be_a_token_is_refused_and_not_shown(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        read_token(path, "key")
    assert not text or text not in str(caught.value)
    with pytest.raises(ConfigError, match=r"cannot read the token .*no such file"):
        read_token(tmp_path / "none", "key")


def test_only_the_token_opens():
    assert is_authorised(bearer(TOKEN)["Authorization"], TOKEN)
    assert is_authorised(f"bearer {TOKEN}", TOKEN)
    for wrong in (
        None,
        "",
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer ü",
    ):
        assert not is_authorised(wrong, TOKEN)
    assert is_authorised(None, None)
    assert bearer(None) == {}


def test_only_the_loopback_goes_without_a_token():
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("no-such-host.invalid")
    assert access_faults("127.0.0.1", None, False) == []
    assert access_faults("0.0.0.0", TOKEN, False) == access_faults("0.0.0.0", None, True) == []
    (fault,) = access_faults("0.0.0.0", None, False)
    assert "inference.token_file" in fault and TOKEN_VARIABLE in fault and "inference.allow_no_token=true" in fault
