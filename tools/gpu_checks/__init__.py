"""The checks of `tools/gpu_check.py`: one file a subject, each check in a separate process."""
