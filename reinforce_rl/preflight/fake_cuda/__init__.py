"""Run the GPU path without a GPU: CUDA tensors without data, a process group of any size, and a record of it all.

`install` does so for the life of the process, and must come before torch or megatron is imported.
"""
