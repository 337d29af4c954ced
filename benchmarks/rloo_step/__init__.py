"""One RLOO step on the same inputs in this project's trainer and in TRL's, each in a process of its own.

`workload` and `reward` are imported by both sides, so they need nothing but the standard library.
"""
