"""Helpers that do not depend on training: processes, files, addresses and ports."""
