"""The engine's half of vLLM: `python -m reinforce_rl.generation.vllm.host`. Written to 0.32."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from reinforce_rl.generation.engine import ABORTED, Answer, EngineArguments, Request
from reinforce_rl.generation.engine.host import RequestsUnderway, answers_of, check_version, main

WORKER = "reinforce_rl.generation.vllm.worker.WeightsOfTrainer"
ADAPTER = "policy", 1  # name and number in vLLM
ABORT_AGAIN_SECONDS = 0.05


class VLLMHost(RequestsUnderway):
    """See `EngineHost`."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._have_tokens: set[str] = set()  # names of requests
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
        # On a CPU nothing is compiled, and VLLM_CPU_KVCACHE_SPACE has the cache's size.
        if self._on_cpu:
            # Otherwise each new engine compiles the sampler with a C++ compiler.
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
            # A prompt in chunks would fail: vLLM draws after each chunk, and cannot rewind a CPU's
            # generator.
            options |= {"enforce_eager": True, "enable_chunked_prefill": False}
            del options["gpu_memory_utilization"]
        if arguments.lora_rank:
            sizes = typing.get_args(importlib.import_module("vllm.config.lora").MaxLoRARanks)
            size = min(size for size in sizes if size >= arguments.lora_rank)
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": size}
            # LoRA leaves the weights frozen: level 1 keeps them in host memory.
            self._sleep_level = 1
        settings = package.AsyncEngineArgs(
            model=arguments.model,
            dtype=arguments.dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            max_num_seqs=arguments.max_batch_size,
            max_model_len=arguments.max_seq_len,
            max_num_batched_tokens=max(
                arguments.max_num_tokens, arguments.max_seq_len, arguments.max_batch_size
            ),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # sampling parameters come only from requests
            logprobs_mode="processed_logprobs",  # of the sampled distribution
            enable_sleep_mode=not self._on_cpu,
            worker_extension_cls=WORKER,
            seed=0,
            **options,
        )
        self._engine = importlib.import_module(
            "vllm.v1.engine.async_llm"
        ).AsyncLLM.from_engine_args(settings)
        return await self._engine.collective_rpc("device_id")

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        return await answers_of(
            [self._complete(request, next(self._names)) for request in requests], seconds
        )

    async def _complete(self, request: Request, name: str) -> Answer:
        sampling = request.sampling
        params = importlib.import_module("vllm").SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            seed=sampling.seed % 2**63,
            temperature=sampling.temperature or 0.0,  # None: greedy
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p or 1.0,
            repetition_penalty=1.0
            if sampling.repetition_penalty is None
            else sampling.repetition_penalty,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=True,  # end tokens are in stop_token_ids, so that they stay in the output
            logprobs=0,
            detokenize=False,
            output_kind=importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA,
            # Two outputs: the first token, and all others at the end.
            stream_interval=sampling.max_tokens + 1,
        )
        # The salt separates the prefix cache's entries of one weight update from those of others.
        prompt = {"prompt_token_ids": list(request.tokens), "cache_salt": str(self._updates)}
        tokens = []
        log_probs = []
        try:
            async for result in self._engine.generate(
                prompt, params, request_id=name, lora_request=self._adapter
            ):
                (output,) = result.outputs
                pairs = zip(output.token_ids, output.logprobs or (), strict=True)
                log_probs += [candidates[token].logprob for token, candidates in pairs]
                tokens += output.token_ids
                self._have_tokens.update([name] if tokens else [])
        finally:
            self._have_tokens.discard(name)
        if output.finish_reason not in ("stop", "length", "abort"):
            return Answer(fault=f"it ended by {output.finish_reason!r}")
        spans = output.weight_versions or ()
        updates = tuple(int(span.version) for span in spans for _ in range(span.start, span.end))
        fault = ABORTED if output.finish_reason == "abort" else None
        return Answer(
            tuple(tokens), tuple(log_probs), output.finish_reason == "stop", fault, updates
        )

    async def take_back(self) -> None:
        await self._abort(self._underway)

    async def pause(self) -> None:
        # clear_cache would take the cache from requests under way, which would be computed again.
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        # A request without a token would begin with the old weights' salt, and so their prefixes.
        await self._abort(
            [
                number
                for number, underway in self._underway.items()
                if underway.name not in self._have_tokens
            ]
        )

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def _abort(self, numbers: Iterable[int]) -> None:
        names = {self._underway[number].answer: self._underway[number].name for number in numbers}
        while waits := [answer for answer in names if not answer.done()]:
            # Repeated, because the engine does not know a request that is still on its way.
            await self._engine.abort([names[answer] for answer in waits])
            await asyncio.wait(waits, timeout=ABORT_AGAIN_SECONDS)

    async def update_weights(self, bucket: dict[str, Any] | None) -> None:
        await self._engine.collective_rpc("load_bucket", args=(bucket,))
        if bucket is None:
            await self._count_update()

    async def load_adapter(self, folder: str, sums: dict[str, int]) -> None:
        request = importlib.import_module("vllm.lora.request").LoRARequest
        # In place, for requests under way. With load_inplace in `self._adapter`, each token would
        # load it again.
        await self._engine.add_lora(request(*ADAPTER, folder, load_inplace=True))
        self._adapter = request(*ADAPTER, folder)
        await self._engine.collective_rpc("check_adapter", args=(ADAPTER[1], sums))
        await self._count_update()

    async def _count_update(self) -> None:
        self._updates += 1
        # vLLM labels each token with this version.
        await self._engine.update_weight_version(str(self._updates))

    async def layer_outputs(self, request: Request) -> list[tuple[list[int], bytes]]:
        """Return the residual stream of a prompt after each decoder layer.

        Compiled layers record nothing.
        """
        await self._engine.reset_prefix_cache()
        await self._engine.collective_rpc("watch_layers")
        await self._complete(request, next(self._names))
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
    # The trainer has died. vLLM's processes are in the same group and would stay.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    main(VLLMHost())
