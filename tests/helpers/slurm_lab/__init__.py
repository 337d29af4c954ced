"""A real Slurm on this machine: one controller and four virtual nodes, for tests."""

from helpers.slurm_lab.lab import Component, Job, SlurmLab, missing_for_a_lab
from helpers.slurm_lab.leftovers import assert_nothing_left, processes_of

__all__ = [
    "Component",
    "Job",
    "SlurmLab",
    "assert_nothing_left",
    "missing_for_a_lab",
    "processes_of",
]
