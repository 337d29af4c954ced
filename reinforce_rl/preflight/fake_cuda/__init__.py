"""Run the GPU path without a GPU: `install`, before torch is imported, fakes CUDA and the process group for good."""
