"""Each question about a configuration is answered in one place, which all other code uses."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "tools")]
from house import PACKAGE, imported_names, source_files  # noqa: E402

from reinforce_rl.config.actor import COLOCATED  # noqa: E402

SCHEMA = "config/actor.py"
# Expressions that are compared or tested for truth, and the files that may do so.
DECIDED_BY = {
    # `uses_reference`; the controller needs beta as a number.
    "initial_policy_kl_penalty": {SCHEMA},
    "beta": set(),
    # `is_off_policy`
    "max_staleness": {SCHEMA},
    "staleness": {SCHEMA, "rollout/source.py"},
    "_staleness": set(),
    # `takes_several_updates`
    "reinforce_epochs": {SCHEMA},
}
BETA_IS_READ_IN = {SCHEMA, "trainer/state.py"}


# Any comparison of these decides whether there is a KL; for others, one with a number or None.
KL_NAMES = {"initial_policy_kl_penalty", "beta"}
# Calls whose value is one of their arguments or its truth.
TRANSPARENT = {"float", "int", "abs", "min", "max", "bool", "any", "all", "isclose"}


def last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def carried(node: ast.expr, aliases: dict[str, str]) -> set[str]:
    """Return the settings whose value an expression may have: `x.beta` for `float(x.beta)`."""
    names = set()
    if isinstance(node, ast.Name | ast.Attribute):
        name = last_name(node)
        if name in DECIDED_BY:
            names.add(name)
        elif isinstance(node, ast.Name) and name in aliases:
            names.add(aliases[name])
        elif isinstance(node, ast.Attribute) and node.attr == "value":
            names |= carried(node.value, aliases)
    elif isinstance(node, ast.NamedExpr):
        names |= carried(node.value, aliases)
    elif isinstance(node, ast.IfExp):
        names |= carried(node.body, aliases) | carried(node.orelse, aliases)
    elif isinstance(node, ast.BoolOp | ast.List | ast.Tuple):
        for value in node.values if isinstance(node, ast.BoolOp) else node.elts:
            names |= carried(value, aliases)
    elif isinstance(node, ast.Call):
        function = last_name(node.func)
        if function == "getattr" and len(node.args) > 1:
            setting = node.args[1]
            if isinstance(setting, ast.Constant) and setting.value in DECIDED_BY:
                names.add(setting.value)
        elif function in TRANSPARENT:
            for argument in node.args:
                names |= carried(argument, aliases)
        elif function == "__bool__" and isinstance(node.func, ast.Attribute):
            names |= carried(node.func.value, aliases)
    return names


def aliases_in(tree: ast.AST) -> dict[str, str]:
    """Return the locals that hold a setting after any number of assignments."""
    aliases: dict[str, str] = {}
    size = -1
    while size < len(aliases):
        size = len(aliases)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                targets = [node.target]
            else:
                continue
            if node.value is None:
                continue
            for setting in carried(node.value, aliases):
                for target in targets:
                    if isinstance(target, ast.Name) and target.id not in DECIDED_BY:
                        aliases.setdefault(target.id, setting)
    return aliases


def truth_tests(tree: ast.AST, aliases: dict[str, str]) -> Iterator[ast.expr]:
    """Yield expressions that are tested for truth or compared with a number or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.Call):
            if last_name(node.func) in ("bool", "any", "all", "isclose", "__bool__"):
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_none = any(isinstance(side, ast.Constant) and side.value is None for side in sides)
            is_with_number = is_none or any(map(is_number, sides))
            for side in sides:
                if is_with_number or carried(side, aliases) & KL_NAMES:
                    yield side


def decisions(source: str) -> list[tuple[int, str]]:
    """Return (line, name) of each decision that belongs in one place."""
    tree = ast.parse(source)
    aliases = aliases_in(tree)
    tested = set()
    for node in truth_tests(tree, aliases):
        tested |= {(node.lineno, name) for name in carried(node, aliases)}
    return sorted(tested)


def test_reference_and_ratio_are_decided_by_the_configuration() -> None:
    elsewhere = []
    for path in source_files(PACKAGE):
        place = str(path.relative_to(PACKAGE))
        for line, name in decisions(path.read_text(encoding="utf-8")):
            if place not in DECIDED_BY[name]:
                elsewhere.append(f"{place}:{line} decides by {name}")
    assert elsewhere == [], "ask cfg.uses_reference, is_off_policy or takes_several_updates"


@pytest.mark.more
def test_beta_of_the_configuration_is_read_as_a_number_by_its_controller_alone() -> None:
    readers = set()
    for path in source_files(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "initial_policy_kl_penalty":
                readers.add(str(path.relative_to(PACKAGE)))
    assert readers == BETA_IS_READ_IN


@pytest.mark.more
def test_the_settings_of_placement_are_listed_in_the_schema_alone() -> None:
    """A second list of some of them would miss a new one."""
    lists = []
    for path in source_files(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                texts = node.keys
            elif isinstance(node, ast.List | ast.Set | ast.Tuple):
                texts = node.elts
            else:
                continue
            settings = [text.value for text in texts if isinstance(text, ast.Constant)]
            if len(COLOCATED.keys() & set(settings)) > 2:
                lists.append(str(path.relative_to(PACKAGE)))
    assert lists == [SCHEMA]


def asks_which_source(source: str) -> bool:
    """Return whether a node compares a configuration's `reward` with one or several names."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Attribute) and side.attr == "reward":
                others = [other for other in (node.left, *node.comparators) if other is not side]
                if not any(map(is_number, others)):
                    return True
    return False


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = cfg.reward == 'server'", True),
        ("x = 'function' != self.cfg.reward", True),
        ("x = cfg.reward in REWARDS", True),
        ("x = row.reward > 0", False),
        ("x = cfg.reward_class is not None", False),
    ],
)
def test_a_question_which_source_is_asked_is_found(source, expected) -> None:
    assert asks_which_source(source) is expected


def test_which_reward_source_is_asked_is_decided_by_the_configuration() -> None:
    """Other code uses `reward_terms`, `reward_class`, `reward_servers` or `reward_functions`."""
    places = set()
    for path in source_files(PACKAGE):
        if asks_which_source(path.read_text(encoding="utf-8")):
            places.add(str(path.relative_to(PACKAGE)))
    assert places == {SCHEMA}


@pytest.mark.more
def test_one_file_reads_the_variables_of_a_launcher() -> None:
    """Other code uses `JobRank`."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    places = set()
    for path in source_files(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names:
                places.add(str(path.relative_to(PACKAGE)))
    # It unsets them for an engine.
    others = {"generation/engine/process.py"}
    assert places - others == {"utils/job_rank.py"}


def test_one_library_asks_over_http() -> None:
    """Python's own HTTP client is left around Slurm's tasks."""
    libraries = (
        "aiohttp",
        "http.client",
        "httpx",
        "requests",
        "tritonclient",
        "urllib.request",
        "urllib3",
    )
    places: dict[str, set[str]] = {}
    for path in source_files(PACKAGE):
        for _, name in imported_names(path):
            if name in libraries or name.startswith("tritonclient."):
                places.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(PACKAGE)))
    servers = {"monitoring/dashboard.py", "reward_model/server/front.py"}
    assert places.pop("aiohttp") - servers == {"rewards/transport.py"}
    # Triton's requests and responses without its connections, and proxy settings.
    assert places.pop("tritonclient") == places.pop("urllib") == {"rewards/transport.py"}
    assert places == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if cfg.initial_policy_kl_penalty: pass", ["initial_policy_kl_penalty"]),
        ("x = 0 if rl.initial_policy_kl_penalty else 1", ["initial_policy_kl_penalty"]),
        ("x = beta > 0 and other", ["beta"]),
        ("x = bool(self.beta)", ["beta"]),
        ("while not self.staleness: pass", ["staleness"]),
        ("x = [y for y in z if cfg.max_staleness is None]", ["max_staleness"]),
        ("x = 1 < cfg.reinforce_epochs", ["reinforce_epochs"]),
        ("x = cfg.reinforce_epochs * len(updates)", []),
        ("x = len(ahead) <= self.staleness", []),
        ("if cfg.uses_reference: pass", []),
        ("b = rl.initial_policy_kl_penalty\nif b > 0: pass", ["initial_policy_kl_penalty"]),
        ("b: float = past.beta.value\nc = b\nx = c != 0", ["beta"]),
        ("if (b := beta): pass", ["beta"]),
        ("x = beta > ZERO", ["beta"]),
        ("x = min(beta, 1) > 0", ["beta"]),
        ("x = math.isclose(beta, 0)", ["beta"]),
        ("x = any([beta])", ["beta"]),
        ("if float(past.beta.value): pass", ["beta"]),
        ("match rl.initial_policy_kl_penalty:\n    case 0: pass", ["initial_policy_kl_penalty"]),
        ("if getattr(rl, 'initial_policy_kl_penalty'): pass", ["initial_policy_kl_penalty"]),
        ("b = past.beta.value\nx = b * kl", []),
    ],
)
def test_the_scan_tells_decisions_apart(source: str, names: list[str]) -> None:
    assert [name for _, name in decisions(source)] == names
