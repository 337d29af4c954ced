"""A test double of CUDA and of the process group: run the GPU path without a GPU.

`machine.install`, called before torch is imported, replaces both for the rest of the process.
"""
