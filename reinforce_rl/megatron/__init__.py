"""All that touches megatron-core: its process groups, its model, its optimizer, its checkpoints.

Nothing outside this folder imports `megatron.core`. Importing this package prepares megatron for a machine without
CUDA (`cpu_support`); where CUDA is present nothing is changed.
"""

from reinforce_rl.megatron.cpu_support import enable_cpu_support

enable_cpu_support()
