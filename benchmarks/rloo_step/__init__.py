"""One RLOO step on the same inputs in this project's trainer and in TRL's, in separate processes.

Both sides import `workload` and `reward`, so these need nothing but the standard library.
"""
