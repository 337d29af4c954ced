"""Files generated from the configuration schemas: YAML, the page of keys and JSON schemas."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import compose
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("config_docs", ROOT / "tools" / "config_docs.py")
assert _spec is not None
assert _spec.loader is not None
config_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(config_docs)


def test_the_files_are_as_generated():
    stale = [
        str(path)
        for path, text in config_docs.generated().items()
        if path.read_text("utf-8") != text
    ]
    assert stale == [], "run python tools/config_docs.py --write"


@pytest.mark.parametrize("name", config_docs.PROGRAMS)
def test_the_json_schema_has_every_key_and_allows_interpolations(name):
    schema = json.loads((ROOT / "conf" / "schema" / f"{name}.schema.json").read_text("utf-8"))

    def check(node: Any, group: dict[str, Any]) -> None:
        group = schema["$defs"][group["$ref"].rpartition("/")[2]] if "$ref" in group else group
        for key, value in node.items():
            key_schema = group["properties"][key]
            if isinstance(value, dict) and "$ref" in key_schema:
                check(value, key_schema)
            else:
                assert key_schema["anyOf"][-1]["pattern"].startswith(r"^(\$\{"), key

    composed = OmegaConf.to_container(compose(name=name))
    assert isinstance(composed, dict)
    check(composed, schema)
