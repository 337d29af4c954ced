"""Files that somebody else may have made: what is not a regular file is an error at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.errors import check_error, raises_error

from reinforce_rl.utils.untrusted_files import (
    UnreadableFileError,
    check_entries,
    check_folder,
    config_loader,
    open_regular,
    parse_json,
    parse_yaml,
    read_bounded,
    read_json,
    read_published,
)

pytestmark = pytest.mark.timeout(20)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


LOOP = "a link to itself"
ODD = {
    "a fifo": make_fifo,
    "a socket": make_socket,
    "a folder": lambda path: path.mkdir(),
    "/dev/zero, a device": lambda path: path.symlink_to("/dev/zero"),
    "/dev/tty, a device": lambda path: path.symlink_to("/dev/tty"),
    LOOP: lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_named(kind, tmp_path):
    path = tmp_path / "entry"
    ODD[kind](path)
    with pytest.raises(UnreadableFileError) as caught:
        open_regular(path)
    if kind == LOOP:
        check_error(caught.value, "file.not_readable", path)
    else:
        check_error(caught.value, "file.not_regular", path, kind)


def test_a_link_is_followed_within_the_folder_only(tmp_path):
    (tmp_path / "secret").write_text("outside")
    folder = tmp_path / "folder"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "1").write_text("inside")
    (folder / "in").symlink_to("blobs/1")
    (folder / "out").symlink_to("../secret")
    (folder / "parent").symlink_to("..")
    (tmp_path / "alias").symlink_to(folder)

    assert read_bounded(folder / "in", max_bytes=6, within=folder) == b"inside"
    assert (
        read_bounded(tmp_path / "alias" / "in", max_bytes=6, within=tmp_path / "alias") == b"inside"
    )
    assert read_bounded(folder / "out", max_bytes=7) == b"outside"
    for name in ("out", "parent/secret"):
        with pytest.raises(UnreadableFileError) as caught:
            open_regular(folder / name, within=folder)
        secret = tmp_path / "secret"
        check_error(caught.value, "file.link.leads_out", folder / name, secret)


def test_a_file_that_is_exchanged_for_a_fifo_is_seen_after_opening(tmp_path, monkeypatch):
    path = tmp_path / "entry"
    path.write_text("x")
    real_open = os.open

    def exchanging_open(name, flags, *arguments):
        path.unlink()
        os.mkfifo(path)
        return real_open(name, flags, *arguments)

    monkeypatch.setattr(os, "open", exchanging_open)
    with raises_error("file.not_regular", path, "fifo"):
        open_regular(path)


def test_a_file_that_is_exchanged_for_a_link_out_is_seen_after_opening(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("outside")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "entry").write_text("inside")
    system_open = os.open

    def exchange_and_open(path, flags):
        (folder / "entry").unlink()
        (folder / "entry").symlink_to("../secret")
        return system_open(path, flags)

    monkeypatch.setattr(os, "open", exchange_and_open)
    named = (folder / "entry", tmp_path / "secret")
    with raises_error("file.link.leads_out", *named):
        open_regular(folder / "entry", within=folder)


def test_a_missing_file_stays_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "entry"
    path.write_text("x")
    path.chmod(0)
    with raises_error("file.not_readable", path, "Permission denied"):
        open_regular(path)


def test_a_nul_in_a_path_is_a_sentence(tmp_path):
    with raises_error("file.not_readable", tmp_path):
        open_regular(tmp_path / "a\0b")


def test_size_is_bounded(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"x" * 10)
    assert read_bounded(path, max_bytes=10) == b"x" * 10
    with raises_error("file.too_large", path, "10 bytes", 9):
        read_bounded(path, max_bytes=9)


def test_the_entries_of_a_folder_are_checked_and_folders_below_are_not(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "below").mkdir()
    os.mkfifo(tmp_path / "below" / "pipe")
    check_entries(tmp_path, within=tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    check_entries(tmp_path, within=tmp_path)
    os.mkfifo(tmp_path / "added_tokens.json")
    with raises_error("file.not_regular", tmp_path / "added_tokens.json", "fifo"):
        check_entries(tmp_path, within=tmp_path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000 + "]" * 100_000, "100 levels"),
        ('{"a":' * 101 + "0" + "}" * 101, "100 levels"),
        ("1" * 10_000, "10000 digits"),
        ("-" + "1" * 41, "41 digits"),
        (b'"\xff"', "utf-8"),
        ("{", "Expecting"),
        ("\0", "Expecting"),
    ],
)
def test_json_that_no_reader_could_use_is_a_value_error(text, part):
    with pytest.raises(ValueError, match=part):
        parse_json(text)


def test_json_within_the_bounds_is_what_python_reads(tmp_path):
    nested = "[" * 99 + "]" * 99
    assert parse_json(f'{{"a": {nested}, "digits": "{"1" * 50}", "n": {"1" * 40}}}')["n"] == int(
        "1" * 40
    )
    assert parse_json("[" + ",".join(["[]"] * 1000) + "]") == [[]] * 1000
    (tmp_path / "a.json").write_text('{"\\u00fc": 1.5}')
    assert read_json(tmp_path / "a.json") == {"ü": 1.5}


COSTLY_YAML = {
    "an integer in hours, minutes and seconds": "a: 1" + ":1" * 200_000,
    "a fraction in hours, minutes and seconds": "a: 1" + ":1" * 200_000 + ".5",
    "a long integer": "a: 1" + "0" * 200_000,
    "a long hexadecimal integer": "a: -0x" + "f" * 200_000,
    "a long binary integer": "a: 0b" + "1_" * 200_000,
    "a long fraction": "a: ." + "1" * 200_000,
    "a long exponent": "a: 1e" + "9" * 200_000,
}


@pytest.mark.parametrize("kind", COSTLY_YAML)
def test_a_long_number_in_yaml_is_refused_before_it_is_computed(kind):
    text = f"b: 1\n{COSTLY_YAML[kind]}"
    with pytest.raises(
        ValueError, match=r"^line 2: a number of \d+ characters; expected at most 40"
    ):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "".join(f"%TAG !a{index}! x\n" for index in range(9)) + "---\na: 1",
            "line 1: a directive",
        ),
        ("# text\n%YAML 1.2\n---\na: 1", "line 2: a directive"),
        ("a: 1\n...\n%YAML 1.1\n---\n", "line 3: a directive"),
        ("a: 1\n%TAG ! x\n%TAG ! x\n", "line 2: a directive"),
        ("[" * 100_000 + "\n%", "line 1: more than 32 levels"),
        ("a:\n  b: !!timestamp never", "line 2: a tag .*timestamp"),
        ("a: !!bool maybe", "line 1: a tag .*bool"),
        ("a: !!int ''", "line 1: a tag .*int"),
        ("a: !!binary aGk=", "line 1: a tag .*binary"),
        ("a: !!set {x, y}", "line 1: a tag .*set"),
        ("a: !!omap [x: 1]", "line 1: a tag .*omap"),
        ("a: !!python/object/apply:pathlib.PosixPath [[1]]", "line 1: a tag .*PosixPath"),
        ("a: ! 1", "line 1: a tag"),
        ("a: &a [1]\n<<: [*a, *a]", r"line 2: an alias \(\*a\)"),
        ("a: 1\n" + "- {" * 40, "not valid YAML"),
        ("[" * 40 + "]" * 40, "line 1: more than 32 levels"),
        ("".join(f"k{index}: 1\n" for index in range(6000)), "line 5000: more than 10000 keys"),
        ("a: 1\na: 2", "duplicate key a"),
        ("? [a]\n: 1", "unhashable key"),
    ],
)
def test_yaml_that_could_become_large_or_fail_oddly_is_one_sentence(text, part):
    with pytest.raises(ValueError, match=part) as error:
        parse_yaml(text)
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_yaml_within_the_bounds_is_what_omegaconf_reads():
    digest = "0123456789abcdef" * 4
    text = f"a: 1e-5\nb: [0x1f, 1.5, -3, .inf, true, null, '{'7' * 99}', {digest}]\nc: {{<<: {{d: 1}}}}\n"
    expected = {
        "a": 1e-5,
        "b": [31, 1.5, -3, float("inf"), True, None, "7" * 99, digest],
        "c": {"d": 1},
    }
    assert parse_yaml(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a: 1e-5\nb: .5e-3\nc: 1:30.5\nd: 1_000\ne: 1.e+5\nf: -.inf\ng: .nan2\nh: 1e\n",
        "a: 2024-01-01\nb: 2024-01-01 10:00:00\nc: on\nd: ~\ne: 0o17\nf: 017\n",
        "a: {1: 2, '1': 3}\nb: {true: 1, 'true': 2}\n",
        "a: 1\nb: 2\na: 3\n",
        "? [1, 2]\n: 3\n",
    ],
)
def test_yaml_is_read_as_omegaconf_reads_it(text):
    from omegaconf._utils import get_yaml_loader

    def read(loader: Any) -> Any:
        try:
            return yaml.load(text, Loader=loader)
        except yaml.YAMLError as error:
            return str(error)

    assert read(config_loader()) == read(get_yaml_loader())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('a: "50\n% of them"', "50 % of them"),
        ("a: '50\n% of them'", "50 % of them"),
        ("{a: 50\n% of them}", "50 % of them"),
        ("a: |\n  x\n  % of them", "x\n% of them"),
    ],
)
def test_a_percent_sign_within_a_value_is_no_directive(text, value):
    assert parse_yaml(text) == {"a": value}


def test_a_folder_may_be_a_link_within_the_folder_in_which_it_stands(tmp_path):
    (tmp_path / "run" / "real").mkdir(parents=True)
    (tmp_path / "run" / "inside").symlink_to("real")
    (tmp_path / "run" / "outside").symlink_to(tmp_path)
    check_folder(tmp_path / "run" / "real")
    check_folder(tmp_path / "run" / "inside")
    check_folder(tmp_path / "run" / "absent")
    path = tmp_path / "run" / "outside"
    with pytest.raises(UnreadableFileError) as caught:
        check_folder(path)
    check_error(
        caught.value,
        "folder.link.leads_out",
        path,
        f"{tmp_path},",
        f"outside of {tmp_path / 'run'};",
    )


def test_what_another_node_publishes_is_none_until_it_is_there(tmp_path):
    path = tmp_path / "run" / "there.json"
    assert read_published(path) is None
    path.parent.mkdir()
    assert read_published(path) is None
    path.write_text('{"port": 7}')
    assert read_published(path) == {"port": 7}
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text("{}")
    with raises_error("file.link.leads_out", path):
        read_published(path)
