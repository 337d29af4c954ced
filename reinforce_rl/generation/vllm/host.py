"""The engine's half of vLLM: `python -m reinforce_rl.generation.vllm.host`. Written to 0.32."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import signal
import typing
from collections.abc import Sequence
from typing import Any

from reinforce_rl.generation.engine import Answer, EngineArguments, Request
from reinforce_rl.generation.engine.host import answers_of, check_version, main

WORKER = "reinforce_rl.generation.vllm.worker.WeightsOfTrainer"


class VLLMHost:
    """See `EngineHost`."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._numbers = itertools.count()
        self._on_cpu = False
        self._sleep_level = 2  # drops the weights
        self._adapter: Any = None

    @property
    def is_alive(self) -> bool:
        return self._engine is None or not self._engine.errored

    async def start(self, arguments: EngineArguments) -> list[str]:
        package = importlib.import_module("vllm")
        check_version("vllm", str(package.__version__).split("+")[0], ["0.32"])
        self._on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
        options = dict(arguments.options)
        if self._on_cpu:  # nothing is compiled, and VLLM_CPU_KVCACHE_SPACE has the cache's size
            os.environ["TORCH_COMPILE_DISABLE"] = "1"  # else the sampler is, by a C++ compiler, in each new engine
            # A prompt in parts ends it: vLLM draws after each part, and cannot set a CPU's generator back.
            options |= {"enforce_eager": True, "enable_chunked_prefill": False}
            del options["gpu_memory_utilization"]
        if arguments.lora_rank:
            sizes = typing.get_args(importlib.import_module("vllm.config.lora").MaxLoRARanks)
            size = min(size for size in sizes if size >= arguments.lora_rank)
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": size}
            self._sleep_level = 1  # keeps them in the machine's memory, as they are frozen
        settings = package.AsyncEngineArgs(
            model=arguments.model,
            dtype=arguments.dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            max_num_seqs=arguments.max_batch_size,
            max_model_len=arguments.max_seq_len,
            max_num_batched_tokens=max(arguments.max_num_tokens, arguments.max_seq_len, arguments.max_batch_size),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # sampling comes from the requests alone
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            enable_sleep_mode=not self._on_cpu,
            worker_extension_cls=WORKER,
            seed=0,
            **options,
        )
        self._engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(settings)
        return await self._engine.collective_rpc("device_id")

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        return await answers_of([self._complete(request) for request in requests], seconds)

    async def _complete(self, request: Request) -> Answer:
        asked = request.sampling
        params = importlib.import_module("vllm").SamplingParams(
            max_tokens=asked.max_tokens,
            min_tokens=asked.min_tokens,
            seed=asked.seed % 2**63,
            temperature=asked.temperature or 0.0,  # None: greedy
            top_k=asked.top_k or 0,
            top_p=asked.top_p or 1.0,
            repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=True,  # end tokens are in stop_token_ids, so that they stay in the output
            logprobs=0,
            detokenize=False,
            output_kind=importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
        )
        prompt, name = {"prompt_token_ids": list(request.tokens)}, str(next(self._numbers))
        async for result in self._engine.generate(prompt, params, request_id=name, lora_request=self._adapter):
            (output,) = result.outputs
        if output.finish_reason not in ("stop", "length"):
            return Answer(fault=f"it ended by {output.finish_reason!r}")
        tokens = tuple(output.token_ids)
        log_probs = tuple(one[token].logprob for token, one in zip(tokens, output.logprobs, strict=True))
        return Answer(tokens, log_probs, output.finish_reason == "stop")

    async def update_weights(self, bucket: dict[str, Any] | None) -> None:
        await self._engine.collective_rpc("load_bucket", args=(bucket,))
        if bucket is None and not await self._engine.reset_prefix_cache():
            raise RuntimeError("the cache of the old weights is still in use")

    async def load_adapter(self, folder: str, sums: dict[str, int]) -> None:
        number = 1 + getattr(self._adapter, "lora_int_id", 0)  # new each time: the prefix cache goes by it
        if self._adapter is not None:
            await self._engine.remove_lora(number - 1)
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self._adapter = request(f"update {number}", number, folder)
        await self._engine.add_lora(self._adapter)
        await self._engine.collective_rpc("check_adapter", args=(number, sums))

    async def layer_outputs(self, request: Request) -> list[tuple[list[int], bytes]]:
        """Return the residual stream of a prompt after each decoder layer; compiled layers record nothing."""
        await self._engine.reset_prefix_cache()
        await self._engine.collective_rpc("watch_layers")
        await self._complete(request)
        return (await self._engine.collective_rpc("watched_layers"))[0]

    async def release(self) -> None:
        if not self._on_cpu:
            await self._engine.sleep(self._sleep_level)

    async def resume_weights(self) -> None:
        if not self._on_cpu:
            await self._engine.wake_up(["weights"])

    async def resume_cache(self) -> None:
        if not self._on_cpu:
            await self._engine.wake_up(["kv_cache"])

    async def stop(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)


if __name__ == "__main__":
    # The trainer has died; vLLM's own processes, which share the group, would stay.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    main(VLLMHost())
