"""Runs the GPU path without a GPU: CUDA tensors without data, a process group of any size, and a count of it all.

`install` turns this process into such a machine, for good. It must come before anything imports torch or megatron.
"""
