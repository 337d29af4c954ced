"""Loggers, rollout samples, live display and report of a run; `run.py` is the trainer's door to them."""
