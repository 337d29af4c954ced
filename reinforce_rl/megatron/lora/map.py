"""Which low-rank updates a model has, under PEFT's names, and how the matrices of each are shared by the ranks.

LoRA (arXiv:2106.09685) adds `alpha / r * B A` to a frozen weight W [out, in], with A [r, in] and B [out, r]. A
column-parallel weight is cut along `out`, and so is B; a row-parallel one along `in`, and so is A. The other matrix is
whole on every rank. No process group is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.weights.weight_map import Row, Split, weight_map

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = "all"
# Of a megatron layer, where its updates are submodules.
SUBMODULE = "lora"


@dataclass(frozen=True)
class LoraSettings:
    """The shape of the updates.

    Attributes:
        rank: r.
        alpha: an update is scaled by alpha / r.
        targets: Hugging Face's names of the projections that have one, in the order of `PROJECTIONS`.
        seed: of A.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0

    @classmethod
    def of(cls, rank: int, alpha: float, target_modules: list[str], seed: int) -> LoraSettings:
        """With "all" for every projection."""
        named = tuple(name for name in PROJECTIONS if ALL in target_modules or name in target_modules)
        return cls(rank, alpha, named, seed)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class LoraRow:
    """One update.

    Attributes:
        projection: Hugging Face's name of it in its layer, such as q_proj.
        base: the weight that it is added to.
        a, b: A and B, as in PEFT's folder and in megatron's layer.
    """

    projection: str
    base: Row
    a: Row
    b: Row


def lora_map(arch: Architecture, tp_size: int, settings: LoraSettings) -> list[LoraRow]:
    """Every update of a model, layer by layer, in the order of `weight_map`.

    Args:
        arch: the model.
        tp_size: tensor-parallel ranks.
        settings: of the updates.
    """
    found = []
    for base in weight_map(arch, tp_size):
        projection = base.hf.split(".")[-2]
        if projection in settings.targets and base.hf.endswith(".weight"):
            found.append(_lora_row(base, projection, settings.rank))
    return found


def _lora_row(base: Row, projection: str, rank: int) -> LoraRow:
    split = base.split
    assert split is not None
    # Each projection has rows of its own here, and does not share them with the others of a fused weight.
    own: Split = replace(split, width=split.size, offset=0)
    out_size, in_size = base.shape
    layer = base.megatron.removesuffix(".weight")

    def matrix(name: str, shape: tuple[int, int], cut: bool) -> Row:
        return Row(
            hf=f"{base.hf.removesuffix('.weight')}.{name}.weight",
            megatron=f"{layer}.{SUBMODULE}.{projection}.{name}",
            shape=shape,
            tp_size=base.tp_size,
            split=own if cut else None,
        )

    a = matrix("lora_A", (rank, in_size), split.axis == 1)
    b = matrix("lora_B", (out_size, rank), split.axis == 0)
    return LoraRow(projection, base, a, b)
