from typing import Any

from .. import SIGNATURES, bind
from .llm_args import enum_of

CapacitySchedulerPolicy = enum_of("CapacitySchedulerPolicy")


class Bound:
    """Arguments that bind to the signature named like the class."""

    def __init__(self, **kwargs: Any):
        bind(type(self).__name__, **kwargs)
        self.__dict__.update(kwargs)


class KvCacheConfig(Bound):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        assert 0 < self.free_gpu_memory_fraction <= 1
        assert self.max_tokens > 0


class CudaGraphConfig(Bound):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        assert self.max_batch_size > 0


class SchedulerConfig(Bound):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        assert self.capacity_scheduler_policy in CapacitySchedulerPolicy


if "SleepConfig" in SIGNATURES:
    from . import llm_args

    class SleepConfig(Bound):
        def __init__(self, **kwargs: Any):
            super().__init__(**kwargs)
            assert set(self.restore_modes) <= set(llm_args.ExecutorMemoryType)
            assert set(self.restore_modes.values()) <= {"NONE", "MEMSET", "CPU", "PINNED"}

    llm_args.SleepConfig = SleepConfig
