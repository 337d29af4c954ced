"""The plan of a run before it is started: batches, steps, memory, disk, and everything that is wrong with it."""
