"""Run the GPU path without a GPU: a test double of CUDA and of the process group.

`machine.install`, called before torch is imported, replaces both for the rest of the process.
"""
