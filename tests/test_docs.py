"""The documentation against the repository: links, keys, scripts, commands, the worked example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers.troubleshooting import messages, parts_of, texts_of
from omegaconf import OmegaConf

from reinforce_rl.algorithm.advantages import RewardGroups, leave_one_out, rloo
from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.algorithm.loss import Denominators, LossInputs, LossSettings, policy_loss
from reinforce_rl.config.actor import ReinforceConfig, TrainerConfig
from reinforce_rl.config.describe import expected_of
from reinforce_rl.config.model import OptimConfig

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "slurm" / "README.md",
]
SCRIPT_CONFIGS = ("train_reinforce_actor", "serve_reward_model", "train_reward_model")
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

# Wrong values whose messages the page explains: of type, of choices, out of bounds.
WRONG = (
    (TrainerConfig, "devices", False),
    (ReinforceConfig, "advantage_estimator", True),
    (OptimConfig, "lr", True),
)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def keys_of(config: str) -> set[str]:
    """Return the dotted names of all settings of a YAML file of conf/, without Hydra's own."""

    def walk(node: object, prefix: str) -> set[str]:
        if not isinstance(node, dict) or not node:
            return {prefix[:-1]}
        return {key for name, child in node.items() for key in walk(child, f"{prefix}{name}.")}

    file = ROOT / "conf" / f"{config}.yaml"
    plain = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(plain, dict)
    settings = {name: child for name, child in plain.items() if name not in ("defaults", "hydra")}
    return walk(settings, "")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert not broken


def test_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    paths = (ROOT / "docs").rglob("*.md")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in paths]
    missing = [page for page in pages if f"({page})" not in index]
    assert missing == ["index.md"]


def test_configuration_page_has_the_actors_keys_and_no_others():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.split("## Every key")[1]
    documented = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    assert documented == keys_of("train_reinforce_actor")


def test_migration_page_names_keys_that_exist():
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    known = set().union(*(keys_of(config) for config in SCRIPT_CONFIGS))
    for heading in ("### Configuration", "## From TRL", "## From verl"):
        section = re.split(r"^##", page.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]
        rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
        keys = {
            key for row in rows for key in re.findall(r"`([a-z_]+\.[\w.]+?)(?:=[\w-]+|\.\*)?`", row)
        }
        assert len(keys) > 10, heading
        assert [
            key
            for key in keys
            if key not in known and not any(k.startswith(f"{key}.") for k in known)
        ] == [], heading


def test_the_loop_of_the_concepts_page_is_the_example():
    """Each line of the page's excerpt stands in the script, in the same order."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    script = "examples/minimal_loop.py"
    block = page.split(f"<!-- from {script} -->")[1].split("```python\n")[1].split("```")[0]
    excerpt = [line.strip() for line in block.splitlines() if line.strip()]
    assert len(excerpt) > 10
    lines = (line.strip() for line in (ROOT / script).read_text(encoding="utf-8").splitlines())
    assert [line for line in excerpt if line not in lines] == []


def test_the_tests_of_public_reports_exist():
    page = (ROOT / "tests" / "public_reports.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert tests, row
        for file, name in tests:
            code = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"def {name}(" in code, name


@pytest.mark.more
def test_every_message_of_the_troubleshooting_page_is_printed():
    """The words are in texts of one file of the package, which may join several in a message."""
    texts = [texts_of(path) for path in (ROOT / "reinforce_rl").rglob("*.py")]
    texts.append(
        "\n".join(
            f"… is …; expected {expected_of(section, name, is_of_value=v)}"
            for section, name, v in WRONG
        )
    )
    entries = messages()
    assert len(entries) >= 30
    missing = [
        entry
        for entry in entries
        if not any(all(part in file for part in parts_of(entry)) for file in texts)
    ]
    assert missing == []
    assert not any(all(part in file for part in parts_of("… a rank … sings …")) for file in texts)


@every_page
def test_commands_name_scripts_that_exist(page):
    scripts = re.findall(
        r"(?:python|--nproc-per-node \d+) (examples/[\w/]+\.py)", page.read_text(encoding="utf-8")
    )
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    if page == ROOT / "README.md":
        assert scripts  # otherwise the expression above matches nothing any more


@pytest.mark.parametrize("name", ["README.md", "docs/reward-models.md", "slurm/README.md"])
def test_commands_give_keys_that_exist(name):
    blocks = "\n".join(CODE_BLOCK.findall((ROOT / name).read_text(encoding="utf-8")))
    given = set(re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)=", blocks))
    assert given
    documented = set().union(*(keys_of(config) for config in SCRIPT_CONFIGS))
    assert given - documented == set()


def test_worked_example_of_the_algorithm_page():
    """The numbers of docs/algorithms.md equal the results of the functions that it describes."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rewards = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64)
    log_probs = torch.tensor(
        [[-1.0, -0.5, 0.0], [-2.0, -0.7, -0.3], [-1.5, 0.0, 0.0]], dtype=torch.float64
    )
    reference = torch.tensor(
        [[-1.2, -0.8, 0.0], [-1.8, -0.9, -0.4], [-1.1, 0.0, 0.0]], dtype=torch.float64
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    group = torch.zeros(3, dtype=torch.long)
    everyone = torch.ones(3, dtype=torch.bool)
    log_probs.requires_grad_()

    kl = sequence_kl(log_probs, reference, mask)
    with_kl = rewards - 0.1 * kl
    found_all = leave_one_out(RewardGroups.of(with_kl, group))
    baseline = found_all.baseline
    advantages = found_all.values

    def loss_of(advantages: torch.Tensor, trains: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(mask, advantages[:, None].expand(mask.shape), trains)
        denominators = Denominators(int(trains.sum()), 0, 0)
        return policy_loss(log_probs, None, inputs, denominators, LossSettings())[0]

    loss = loss_of(advantages, everyone)
    loss.backward()
    sums = log_probs.detach().sum(dim=1)
    for i in range(3):
        row = next(line for line in page.splitlines() if line.startswith(f"| {i + 1} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        printed = [float(cells[column]) for column in (4, 5, 6, 7, 8)]
        columns = (kl, with_kl, baseline, advantages, sums)
        assert printed == pytest.approx([column[i].item() for column in columns], abs=1e-9)
    assert f"= {loss.item():.4f}." in page
    assert log_probs.grad is not None
    assert ", ".join(f"{gradient:.4f}" for gradient in log_probs.grad[:, 0]) in page

    two = torch.tensor([True, True, False])
    advantages = rloo(with_kl, group, two)
    loss = loss_of(advantages, two)
    assert f"A = ({advantages[0]:.2f}, {advantages[1]:.2f}), M = 2, L = {loss.item():.2f}." in page
