"""Recorded steps explained: made again, given other settings, and where two runs part."""
