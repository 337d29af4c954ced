"""megatron's save in its parts, so that the one that takes time can run while the training goes on.

`dist_checkpointing.save` in one piece leaves other ranks waiting in a collective where one cannot write, and its
writers are forked processes, which outlive a run that is killed. Here every part says on its own rank whether it
failed, and the writer is this process.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

# In its place megatron would start a manager process, which outlives a run that is killed and needs an importable main
# module. Nothing is put into it: the results stay in this process.
filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron's, which hands out the plan instead of functions that run it."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        return writer, save_state_dict_ret[1]


class ShardedWriter:
    """One save of a sharded state. The methods are called in the order in which they stand here.

    Args:
        state: the sharded state; what is not sharded in it is the same on every rank.
        folder: an empty one, for megatron's checkpoint.
    """

    def __init__(self, state: dict[str, Any], folder: Path):
        self._folder = folder
        self._sharded: Any
        self._common: Any
        self._writer: Any
        self._sharded, self._common = save_preprocess(state)

    def write_common(self) -> None:
        """What is not sharded; the first rank writes it.

        Raises:
            OSError: it cannot be written.
        """
        try:
            serialization.get_default_save_common_strategy().save_common(self._common, str(self._folder))
        except Exception as error:  # torch turns a full disk into a RuntimeError
            raise OSError(f"{self._folder / 'common.pt'}: {error}") from error

    def plan(self, *, copy: bool) -> None:
        """Settle which rank writes what, and bring it to host memory; a collective call.

        Args:
            copy: take a copy, so that the weights may change before `write` is done.
        """
        plan: Any = _Strategy().async_save(self._sharded, self._folder)
        self._writer, self._metadata = plan
        self._buckets = [
            (path, name, (data, [(item, _on_host(tensor, copy)) for item, tensor in tensors]))
            for path, name, (data, tensors) in self._writer.write_buckets
        ]
        self._sharded = self._common = None

    def write(self) -> tuple[list[Any], list[Path]]:
        """Write this rank's share, on any thread.

        Returns:
            what `finish` needs of this rank; the files.

        Raises:
            OSError: a file cannot be written; the text names it.
        """
        results: list[Any] = []
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        for number, bucket in enumerate(self._buckets):
            answers: Any = queue.Queue()
            count: Any = queue.Queue()
            count.put(number)
            FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answers, count, use_fsync=True)
            _, answer = answers.get()
            if isinstance(answer, Exception):
                raise OSError(f"{bucket[0]}: {answer}") from answer
            results += answer
        paths = [Path(path) for path, _, _ in self._buckets]
        self._buckets = []
        return results, paths

    def finish(self, results: list[list[Any]]) -> None:
        """Write the index, on the first rank.

        Args:
            results: of every rank's `write`.
        """
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


def _on_host(tensor: Any, copy: bool) -> Any:
    return tensor.clone() if copy and tensor.device.type == "cpu" else tensor.to("cpu")
