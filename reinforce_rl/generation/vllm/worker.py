"""Extend vLLM's workers: load the trainer's weights, and prove that layers compute with them.

An update is proven twice. Each tensor's checksum shows that it arrived. Then each layer returns
some columns of its weight, as its outputs for unit vectors, and these must equal the arrived ones
bit for bit. This reveals a layer that computes with a packed copy of old weights, such as vLLM
0.32's tied output layer on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.generation.engine import buckets

EMBEDDING = "model.embed_tokens.weight"
OUTPUT_LAYER = "lm_head.weight"
COLUMNS = 4  # of each weight; different ones at each update


class WeightsOfTrainer:
    """A base class that vLLM adds to its worker (`worker_extension_cls`)."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    _updates = 0
    _arrived: dict[str, Tensor]

    def device_id(self) -> str:
        return buckets.device_id(self.device)

    def load_bucket(self, bucket: Mapping[str, Any] | None) -> None:
        """Load a bucket; None ends an update."""
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
        from vllm.model_executor.model_loader import reload  # type: ignore[import-not-found]

        with set_current_vllm_config(self.vllm_config):
            if bucket is None:
                reload.finalize_layerwise_reload(self._model, self.vllm_config.model_config)
                self._check_layers()
                self._arrived = {}
                return
            if not getattr(self, "_arrived", None):
                self._arrived = {}
                self._updates += 1
                reload.initialize_layerwise_reload(self._model)
            self._model.load_weights(self._noted(bucket))

    def check_adapter(self, number: int, sums: Mapping[str, int]) -> None:
        """Raise RuntimeError, with names, if the LoRA updates differ from the sent ones."""
        adapter = self._model.lora_manager.get_adapter(number)
        packed = getattr(self._model, "packed_modules_mapping", {})
        loaded = {}
        for path, weights in adapter.loras.items():
            above, _, leaf = path.rpartition(".")
            parts = packed.get(leaf, [leaf])
            for kind, given in (("lora_A", weights.lora_a), ("lora_B", weights.lora_b)):
                for part, tensor in zip(
                    parts, given if isinstance(given, list) else [given], strict=True
                ):
                    if tensor is not None:
                        loaded[f"{above}.{part}.{kind}.weight"] = buckets.checksum(tensor)
        wrong = sorted(
            name for name in sums.keys() | loaded.keys() if sums.get(name) != loaded.get(name)
        )
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} LoRA matrices are not what was sent: {', '.join(wrong[:5])}"
            )

    def watch_layers(self) -> None:
        """Record the residual stream after each decoder layer, until `watched_layers`."""
        self._seen: list[tuple[list[int], bytes]] = []

        def hook(layer: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
            stream = (outputs[0] + outputs[1]).float().cpu()
            self._seen.append((list(stream.shape), stream.numpy().tobytes()))

        self._hooks = [layer.register_forward_hook(hook) for layer in self._model.model.layers]

    def watched_layers(self) -> list[tuple[list[int], bytes]]:
        """Return shape and float32 values of each layer's [tokens, hidden]."""
        for handle in self._hooks:
            handle.remove()
        return self._seen

    @property
    def _model(self) -> Any:
        return self.model_runner.get_model()

    def _noted(self, bucket: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the bucket's tensors for `load_weights`, and keep columns for `_check_layers`."""
        is_tied = self.vllm_config.model_config.hf_text_config.tie_word_embeddings
        for name, tensor in buckets.received(bucket, self.device_id(), self.device):
            # The output layer may have its own copy of tied weights.
            for known in (name, OUTPUT_LAYER) if is_tied and name == EMBEDDING else (name,):
                self._arrived[known] = (
                    tensor if tensor.dim() == 1 else tensor[:, self._columns(tensor.shape[1])]
                )
                yield known, tensor

    def _columns(self, size: int) -> list[int]:
        return list(
            dict.fromkeys(
                (self._updates * 7919 + i * size // COLUMNS) % size for i in range(COLUMNS)
            )
        )

    def _check_layers(self) -> None:
        """Raise RuntimeError, with names, if a layer does not compute with the arrived weights."""
        packed = getattr(self._model, "packed_modules_mapping", {})
        wrong = []
        left = set(self._arrived)
        for path, module in self._model.named_modules():
            above, _, leaf = path.rpartition(".")
            module = getattr(module, "base_layer", module)  # the layer beneath LoRA's
            for kind in ("weight", "bias"):
                names = [f"{above}.{part}.{kind}".lstrip(".") for part in packed.get(leaf, [leaf])]
                if getattr(module, kind, None) is None or not all(
                    name in self._arrived for name in names
                ):
                    continue
                left -= set(names)
                parts = [self._arrived[name] for name in names]
                matches = self._columns_match if parts[0].dim() == 2 else self._vector_matches
                if not matches(module, kind, parts):
                    wrong += names
        if wrong or left:
            faults = []
            if wrong:
                faults.append(f"old or wrong: {', '.join(wrong[:5])}")
            if left:
                faults.append(f"of no layer: {', '.join(sorted(left)[:5])}")
            raise RuntimeError(
                "the engine does not compute with the weights that it was given; "
                f"{'; '.join(faults)}"
            )

    def _columns_match(self, module: Any, kind: str, parts: list[Tensor]) -> bool:
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        if isinstance(module, VocabParallelEmbedding):
            shard = module.shard_indices
            expected = parts[0][shard.org_vocab_start_index : shard.org_vocab_end_index]
            columns = self._columns(module.embedding_dim)
            every = range(module.embedding_dim)
            is_head = isinstance(module, ParallelLMHead)
            outputs = (
                self._outputs(module, every, columns) if is_head else module.weight[:, columns]
            )
            return torch.equal(outputs[: len(expected)], expected)
        columns = self._columns(module.input_size)
        size = module.input_size_per_partition
        # A row-parallel layer has some of the columns.
        first = getattr(module, "tp_rank", 0) * size if size < module.input_size else 0
        local_columns = range(first, first + size)
        outputs = self._outputs(module, local_columns, columns)
        is_here = torch.tensor(
            [column in local_columns for column in columns], device=outputs.device
        )
        return torch.equal(outputs, self._shard(module, parts) * is_here)

    def _vector_matches(self, module: Any, kind: str, parts: list[Tensor]) -> bool:
        vector = getattr(module, kind)
        is_split = hasattr(module, "output_partition_sizes") and len(vector) < sum(map(len, parts))
        return torch.equal(
            vector, (self._shard(module, parts) if is_split else torch.cat(parts)).to(vector.dtype)
        )

    def _shard(self, module: Any, parts: list[Tensor]) -> Tensor:
        """Return this worker's rows of the parts of a fused weight.

        Several workers may have the same heads of k and v.
        """
        sizes = getattr(module, "output_partition_sizes", None) or [len(part) for part in parts]
        rank = getattr(module, "tp_rank", 0)
        workers = getattr(module, "tp_size", 1)
        starts = [
            rank * len(part) // workers // size * size
            for part, size in zip(parts, sizes, strict=True)
        ]
        return torch.cat(
            [part[at : at + size] for part, at, size in zip(parts, starts, sizes, strict=True)]
        )

    def _outputs(self, module: Any, local_columns: range, columns: list[int]) -> Tensor:
        """Return the layer's outputs for unit vectors, [out, columns].

        A column outside `local_columns` gives zeros.
        """
        places = torch.arange(local_columns.start, local_columns.stop, device=self.device)
        units = (torch.tensor(columns, device=self.device)[:, None] == places).to(
            self.vllm_config.model_config.dtype
        )
        with torch.inference_mode():
            return module.quant_method.apply(module, units, bias=None).T
