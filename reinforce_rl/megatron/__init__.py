"""Everything that imports megatron-core; no other folder imports `megatron.core`.

Importing this package patches megatron for machines without CUDA (`cpu`).
"""

import os

# Kernels then start in launch order, so collectives overlap with matmuls; megatron requires it
# before Blackwell. Set before CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from reinforce_rl.megatron.cpu import enable_cpu_support

enable_cpu_support()
