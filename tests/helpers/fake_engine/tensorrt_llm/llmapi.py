from typing import Any

from . import bind


class KvCacheConfig:
    def __init__(self, **kwargs: Any):
        bind("KvCacheConfig", **kwargs)
        assert 0 < kwargs["free_gpu_memory_fraction"] <= 1
