"""All that touches megatron-core: its process groups, its model, its optimizer, its checkpoints.

Nothing outside this folder imports `megatron.core`. Importing this package prepares megatron for a machine without
CUDA (`cpu/support.py`); where CUDA is present nothing is changed.
"""

import os

# Kernels then start in the order of their launches, so that a collective of tensor or sequence parallelism is not held
# up by the product that it shall overlap with; megatron asks for it before Blackwell. CUDA reads it when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from reinforce_rl.megatron.cpu.support import enable_cpu_support

enable_cpu_support()
