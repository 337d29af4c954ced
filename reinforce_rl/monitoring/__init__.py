"""Loggers, rollout samples, live display and report of a run; `run.py` is their facade."""
