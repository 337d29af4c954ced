"""The process that owns a TensorRT-LLM 1.2 engine: `python -m reinforce_rl.generation.trtllm.host`.

Separate because TensorRT-LLM and Ray alter the process that imports them, and so that it can be killed in any state.
`tests/generation/tensorrt_llm_signatures.json` has the signatures of the calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from reinforce_rl.generation.trtllm import Answer, EngineArguments, Request
from reinforce_rl.utils.process import connect_to_parent

SHUTDOWN_SECONDS = 20.0


class EngineHost:
    """Its public methods are the commands of the trainer."""

    def __init__(self) -> None:
        self._llm: Any = None

    async def start(self, arguments: EngineArguments) -> list[str]:
        """Start the engine, with random weights until the first update; return the device of each worker."""
        package = importlib.import_module("tensorrt_llm")
        version = str(package.__version__)
        if not version.startswith("1.2"):
            raise RuntimeError(f"tensorrt_llm is {version}; expected 1.2, whose interface this was written for")
        options = dataclasses.asdict(arguments)
        fraction = options.pop("free_gpu_memory_fraction")
        config = importlib.import_module("tensorrt_llm.llmapi").KvCacheConfig
        # Only TRTLLMSampler honours request seeds; only chunked prefill lets a prompt exceed max_num_tokens.
        self._llm = package.AsyncLLM(
            **options,
            backend="pytorch",
            skip_tokenizer_init=True,
            max_input_len=arguments.max_seq_len,
            kv_cache_config=config(enable_block_reuse=True, free_gpu_memory_fraction=fraction),
            load_format="dummy",
            enable_sleep=True,
            enable_chunked_prefill=True,
            sampler_type="TRTLLMSampler",
        )
        await self._llm.setup_async()
        return [str(device) for device in await self._llm.collective_rpc("report_device_id")]

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        """Run all requests at once; abort those over time and report them as lost."""
        sampling = importlib.import_module("tensorrt_llm").SamplingParams
        asked = [(list(one.tokens), sampling(**dataclasses.asdict(one.sampling))) for one in requests]
        results = [self._llm.generate_async(tokens, sampling_params=params) for tokens, params in asked]
        waits = [asyncio.ensure_future(result) for result in results]
        await asyncio.wait(waits, timeout=seconds)
        answers = []
        for wait, result in zip(waits, results, strict=True):
            if not wait.done():
                wait.cancel()
                result.abort()
                answers.append(Answer(fault=f"no answer within {seconds:g} s"))
            elif (error := wait.exception()) is not None:
                answers.append(Answer(fault=_text(error)))
            else:
                answers.append(_answer(wait.result()))
        return answers

    async def update_weights(self, handles: dict[str, str] | None) -> None:
        """Load a bucket of weights by device; None after the last resets the prefix cache."""
        await self._llm.update_weights(handles)

    async def release(self, tags: Sequence[str]) -> None:
        await self._llm.release(list(tags))

    async def resume(self, tags: Sequence[str]) -> None:
        await self._llm.resume(list(tags))

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.wait_for(asyncio.to_thread(self._llm.shutdown), SHUTDOWN_SECONDS)


def _answer(result: Any) -> Answer:
    (output,) = result.outputs
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


async def serve(connection: Connection) -> None:
    """Answer commands by (fault, result) until "stop" or until the trainer is gone."""
    host = EngineHost()
    while True:
        try:
            command, arguments = await asyncio.to_thread(connection.recv)
        except (EOFError, OSError):
            command, arguments = "stop", ()
        try:
            reply = None, await getattr(host, command)(*arguments)
        except Exception as error:  # report any engine error to the trainer
            reply = _text(error), None
        try:
            connection.send(reply)
        except OSError:
            return
        if command == "stop":
            return


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    # Also die by signal, as a call into the engine may never return.
    asyncio.run(serve(connect_to_parent(death_signal=signal.SIGTERM)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engine threads may never end


if __name__ == "__main__":
    main()
