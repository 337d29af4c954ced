"""Slurm: a heterogeneous job of reward servers, actor and generators, see docs/operations.md.

What runs on the batch host (`attempt`) and around each task (`task`) needs only Python 3.9 and its
standard library: the batch host may have no environment, and tasks may run in containers.
"""
