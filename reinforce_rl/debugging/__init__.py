"""Recorded steps explained (replay, what-if, where two runs part), and a set-up verified before a run."""
