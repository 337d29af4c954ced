"""Recorded steps: repeated, recomputed with other settings, and compared between two runs."""
