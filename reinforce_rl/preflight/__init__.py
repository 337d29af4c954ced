"""Check a run before it starts: batches, steps, memory, disk, and every fault."""
