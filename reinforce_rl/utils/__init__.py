"""Helpers that do not depend on training: processes, files, ports, durations."""
