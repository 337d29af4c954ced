"""The engine's half of TensorRT-LLM 1.2: `python -m reinforce_rl.generation.trtllm.host`.

`tests/generation/tensorrt_llm_signatures.json` has the signatures of the calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from reinforce_rl.generation.engine import Answer, EngineArguments, EngineSampling, Request
from reinforce_rl.generation.engine.host import RequestsUnderway, answers_of, check_version, main

SHUTDOWN_SECONDS = 20.0
# Memory that a sleeping engine releases, by TensorRT-LLM's tags: all but the cache, and the cache.
WEIGHT_TAGS = ["sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra", "executor_extra"]
WEIGHT_TAGS += ["model", "draft_model"]
CACHE_TAGS = ["kv_cache"]


class TensorRTLLMHost(RequestsUnderway):
    """See `EngineHost`."""

    is_alive = True  # its own calls fail

    def __init__(self) -> None:
        super().__init__()
        self._llm: Any = None

    async def start(self, arguments: EngineArguments) -> list[str]:
        package = importlib.import_module("tensorrt_llm")
        check_version("tensorrt_llm", str(package.__version__), ["1.2"])
        options = dataclasses.asdict(arguments)
        own, _ = options.pop("options"), options.pop("lora_rank")
        config = importlib.import_module("tensorrt_llm.llmapi").KvCacheConfig
        # Only TRTLLMSampler honours request seeds; only chunked prefill lets a prompt exceed max_num_tokens.
        self._llm = package.AsyncLLM(
            **options,
            backend="pytorch",
            skip_tokenizer_init=True,
            max_input_len=arguments.max_seq_len,
            kv_cache_config=config(enable_block_reuse=True, **own),
            load_format="dummy",
            enable_sleep=True,
            enable_chunked_prefill=True,
            sampler_type="TRTLLMSampler",
        )
        await self._llm.setup_async()
        return [str(device) for device in await self._llm.collective_rpc("report_device_id")]

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        return await answers_of([self._complete(request, next(self._names)) for request in requests], seconds)

    async def _complete(self, request: Request, name: str) -> Answer:
        return await _answer(
            self._llm.generate_async(list(request.tokens), sampling_params=_sampling(request.sampling))
        )

    async def update_weights(self, bucket: dict[str, str] | None) -> None:
        await self._llm.update_weights(bucket)  # None also resets the prefix cache

    async def release(self) -> None:
        await self._llm.release(WEIGHT_TAGS + CACHE_TAGS)

    async def resume_weights(self) -> None:
        await self._llm.resume(WEIGHT_TAGS)

    async def resume_cache(self) -> None:
        await self._llm.resume(CACHE_TAGS)

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.wait_for(asyncio.to_thread(self._llm.shutdown), SHUTDOWN_SECONDS)


def _sampling(asked: EngineSampling) -> Any:
    values = dataclasses.asdict(asked)
    del values["min_tokens"]  # it holds back one end token only; the configuration refuses others than 0
    return importlib.import_module("tensorrt_llm").SamplingParams(
        **values,
        end_id=-1,  # disabled: end tokens are in stop_token_ids, so that they stay in the output
        include_stop_str_in_output=True,
        logprobs=1,
        detokenize=False,
    )


async def _answer(result: Any) -> Answer:
    try:
        (output,) = (await result).outputs
    except asyncio.CancelledError:
        result.abort()
        raise
    if output.finish_reason not in ("stop", "length"):
        return Answer(fault=f"it ended by {output.finish_reason!r}")
    tokens = tuple(int(token) for token in output.token_ids)
    log_probs = None
    if output.logprobs:
        if len(output.logprobs) != len(tokens):
            return Answer(fault=f"{len(output.logprobs)} log-probs came with {len(tokens)} tokens")
        pairs = zip(tokens, output.logprobs, strict=True)
        log_probs = tuple(float(one[token].logprob) if isinstance(one, dict) else float(one) for token, one in pairs)
    return Answer(tokens, log_probs, output.finish_reason == "stop")


if __name__ == "__main__":
    main(TensorRTLLMHost())
