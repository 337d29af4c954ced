"""Slurm: a heterogeneous job of reward servers and actor, see docs/slurm.md.

The supervisor (`job`) and the task wrapper (`task`) need only Python 3.9: the batch host may have
no environment, and tasks may run in containers.
"""
