"""What `tools/gpu_check.py` runs: one file a subject, each check in a process of its own."""
