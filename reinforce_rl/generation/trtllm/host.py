"""The engine's half of TensorRT-LLM 1.2 and 1.3: `python -m reinforce_rl.generation.trtllm.host`.

`tests/generation/tensorrt_llm_signatures.json` has the signatures of the calls, and
`tensorrt_llm_signatures_1.3.json` the signatures that 1.3 changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.generation.engine import Answer, EngineArguments, EngineSampling, Request
from reinforce_rl.generation.engine.host import RequestsUnderway, answers_of, check_version, main
from reinforce_rl.utils.untrusted_files import read_json

VERSIONS = ("1.2", "1.3")
WORKER = "reinforce_rl.generation.trtllm.worker.WeightsOfTrainer"
SHUTDOWN_SECONDS = 45.0  # the engine waits 30 s for its workers, and then ends its Ray cluster
CACHE_TAG = "kv_cache"
WEIGHTS_TAG = "model_weights"
NEVER_RELEASED = "_no_capture"  # prefix of tags whose memory the engine cannot release
TOKENS_PER_BLOCK = 32  # of the cache, by default
MASK = 2**64 - 1


class TensorRTLLMHost(RequestsUnderway):
    """See `EngineHost`."""

    is_alive = True  # calls of a dead engine fail

    def __init__(self) -> None:
        super().__init__()
        self._llm: Any = None
        self._weight_tags: list[str] = []
        self._checks_weights = True
        self._key_value_heads = 1

    async def start(self, arguments: EngineArguments) -> list[str]:
        package = importlib.import_module("tensorrt_llm")
        check_version("tensorrt_llm", str(package.__version__), VERSIONS)
        api = importlib.import_module("tensorrt_llm.llmapi")
        self._weight_tags = _tags_but_the_cache()
        self._checks_weights = arguments.options["check_weights"]
        self._key_value_heads = _key_value_heads(Path(arguments.model))
        options = dataclasses.asdict(arguments)
        del options["options"]
        del options["lora_rank"]
        # Only TRTLLMSampler honours request seeds; only chunked prefill lets a prompt exceed
        # max_num_tokens.
        self._llm = package.AsyncLLM(
            **options,
            backend="pytorch",
            skip_tokenizer_init=True,
            max_input_len=arguments.max_seq_len,
            kv_cache_config=api.KvCacheConfig(
                enable_block_reuse=True,
                free_gpu_memory_fraction=arguments.options["free_gpu_memory_fraction"],
                max_tokens=_tokens_of_full_batch(arguments),
            ),
            # Without it there are graphs for batches of 1 to 31, 32, 64 and 128 only.
            cuda_graph_config=api.CudaGraphConfig(
                enable_padding=True, max_batch_size=arguments.max_batch_size
            ),
            # The default reserves room for each response at full length; if most are short, many
            # requests wait needlessly.
            scheduler_config=api.SchedulerConfig(
                capacity_scheduler_policy=api.CapacitySchedulerPolicy.MAX_UTILIZATION
            ),
            load_format="dummy",
            enable_chunked_prefill=True,
            sampler_type="TRTLLMSampler",
            ray_worker_extension_cls=WORKER,
            **_sleep_options(),
        )
        await self._llm.setup_async()
        return [str(device) for device in await self._llm.collective_rpc("report_device_id")]

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        return await answers_of(
            [self._complete(request, next(self._names)) for request in requests], seconds
        )

    async def _complete(self, request: Request, name: str) -> Answer:
        return await _answer(
            self._llm.generate_async(
                list(request.tokens), sampling_params=_sampling(request.sampling)
            )
        )

    async def update_weights(self, bucket: dict[str, Any] | None) -> None:
        held = await self._llm.collective_rpc("load_bucket", args=(bucket,))
        if bucket is None and self._checks_weights:
            check_held(held, self._key_value_heads)

    async def release(self) -> None:
        await self._llm.release([*self._weight_tags, CACHE_TAG])

    async def resume_weights(self) -> None:
        await self._llm.resume(self._weight_tags)

    async def resume_cache(self) -> None:
        await self._llm.resume([CACHE_TAG])

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.wait_for(asyncio.to_thread(self._llm.shutdown), SHUTDOWN_SECONDS)


def check_held(workers: Sequence[Mapping[str, Mapping[str, Any]]], key_value_heads: int) -> None:
    """Compare what the workers hold with what was sent; see `WeightsOfTrainer.load_bucket`.

    Raises:
        RuntimeError: a parameter holds other values or was given none, or a tensor has no
            parameter.
    """
    faults: dict[str, list[str]] = {
        "old or wrong": [],
        "given nothing": [],
        "of no parameter": sorted({name for worker in workers for name in worker["lost"]}),
    }
    copies = max(1, len(workers) // key_value_heads)  # per head of keys and values
    for name, parameter in workers[0]["parameters"].items():
        sent = parameter["sent"]
        held = [worker["parameters"][name]["held"] for worker in workers]
        whole = sum(sent.values()) & MASK
        of_shards = sum(
            total * (copies if ".k_proj." in part or ".v_proj." in part else 1)
            for part, total in sent.items()
        )
        if not sent:
            faults["given nothing"].append(name)
        elif any(total != whole for total in held) and sum(held) & MASK != of_shards & MASK:
            faults["old or wrong"].append(name)
    texts = [f"{kind}: {', '.join(names[:5])}" for kind, names in faults.items() if names]
    if texts:
        raise RuntimeError(
            f"the engine does not hold the weights that it was given; {'; '.join(texts)}. "
            "Where they are right, as this comparison has not seen this release or model, set "
            "tensorrt_llm.check_weights=false"
        )


def _key_value_heads(folder: Path) -> int:
    values = read_json(folder / "config.json")
    return values.get("num_key_value_heads") or values["num_attention_heads"]


def _tokens_of_full_batch(arguments: EngineArguments) -> int:
    """Return the tokens of a cache for all sequences at full length, the most they can use."""
    blocks = -(-arguments.max_seq_len // TOKENS_PER_BLOCK) + 1
    return arguments.max_batch_size * blocks * TOKENS_PER_BLOCK


def _memory_types() -> Any:
    """Return the engine's enum of the memory that it can release; 1.3 moved it."""
    arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    if hasattr(arguments, "ExecutorMemoryType"):
        return arguments.ExecutorMemoryType
    return importlib.import_module("tensorrt_llm._torch.virtual_memory").ExecutorMemoryType


def _tags_but_the_cache() -> list[str]:
    tags = [str(kind.value) for kind in _memory_types()]
    return [tag for tag in tags if tag != CACHE_TAG and not tag.startswith(NEVER_RELEASED)]


def _sleep_options() -> dict[str, Any]:
    """Return the arguments that let the engine sleep.

    1.2 copies all memory but the cache to pinned host memory and back. In 1.3 the weights have
    their own tag and are dropped, because each wake-up sends them again.
    """
    arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    if not hasattr(arguments, "SleepConfig"):
        return {"enable_sleep": True}
    kinds = _memory_types()
    dropped = {kinds(WEIGHTS_TAG): "NONE", kinds(CACHE_TAG): "NONE"}
    return {"sleep_config": arguments.SleepConfig(restore_modes=dropped)}


def _sampling(asked: EngineSampling) -> Any:
    values = dataclasses.asdict(asked)
    # The engine holds back only one end token; the configuration requires 0.
    del values["min_tokens"]
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
        log_probs = tuple(
            float(candidates[token].logprob) if isinstance(candidates, dict) else float(candidates)
            for token, candidates in pairs
        )
    return Answer(tokens, log_probs, output.finish_reason == "stop")


if __name__ == "__main__":
    main(TensorRTLLMHost())
