"""Everything that imports megatron-core; no other folder imports `megatron.core`.

Importing this package patches megatron for machines without CUDA (`cpu`).
"""

import os

# With one connection kernels start in launch order, so collectives overlap with matmuls. megatron
# requires it before Blackwell. It must be set before CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from reinforce_rl.megatron.cpu import enable_cpu_support

enable_cpu_support()
