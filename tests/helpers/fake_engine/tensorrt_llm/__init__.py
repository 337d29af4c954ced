"""A stand-in for TensorRT-LLM in the engine's process, with its signatures.

Every call is bound to `tensorrt_llm_signatures.json` first. Weights arrive in shared memory and
pass through the worker extension into fused and sharded modules; a model of this project answers.
FAKE_ENGINE is a JSON object:

folder: records calls.txt, and weights_N.safetensors and names_N.json after each update.
model: "native" decodes with the native engine, "scripted" derives tokens from the seed.
signatures: an alternative file of signatures.
version: "1.3" adds the signatures that 1.3 changed; the default is 1.2.
seconds_a_token: delay per prompt token before a request is answered.
fault, times, after: the fault to inject, how often, and after how many successes; all engines of
    the folder count together.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OPTIONS = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
_ASKED = OPTIONS.get("version", "1.2")
__version__ = {"1.2": "1.2.1", "1.3": "1.3.0rc21"}.get(_ASKED, _ASKED)
RECORDS = Path(__file__).parents[3] / "generation"
RECORD = RECORDS / "tensorrt_llm_signatures.json"
_RECORDED = Path(OPTIONS.get("signatures", RECORD))
SIGNATURES = json.loads(_RECORDED.read_text())["signatures"]
if __version__.startswith("1.3"):
    _CHANGED = RECORDS / "tensorrt_llm_signatures_1.3.json"
    SIGNATURES |= json.loads(_CHANGED.read_text())["signatures"]
OUTSIDE = 1_000_000


def bind(name: str, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Bind the arguments to TensorRT-LLM's signature, without defaults."""
    parameters = []
    for recorded in SIGNATURES[name]["parameters"]:
        kind = getattr(inspect.Parameter, recorded["kind"])
        parameter = inspect.Parameter(recorded["name"], kind)
        if recorded["default"] is not None and not recorded["kind"].startswith("VAR"):
            parameter = parameter.replace(default=recorded["default"])
        parameters.append(parameter)
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if "folder" in OPTIONS:
        with (Path(OPTIONS["folder"]) / "calls.txt").open("a") as calls:
            calls.write(f"{name} {sorted(bound.arguments)}\n")
    return bound


def strikes(fault: str) -> bool:
    """Return whether this fault is due now."""
    if OPTIONS.get("fault") != fault:
        return False
    file = Path(OPTIONS["folder"]) / f"{fault}.txt"
    count = int(file.read_text()) if file.exists() else 0
    file.write_text(str(count + 1))
    late = count - OPTIONS.get("after", 0)
    return 0 <= late < OPTIONS.get("times", 1)


def note_arguments(arguments: SimpleNamespace) -> None:
    """Record the arguments of the last engine and of its configurations."""
    values: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        values[name] = str(value)
        if hasattr(value, "__dict__"):
            values[name] = {key: str(part) for key, part in vars(value).items()}
    file = Path(OPTIONS["folder"]) / "arguments.json"
    file.write_text(json.dumps(values))


class Bound(SimpleNamespace):
    """Arguments that bind to the signature named like the class."""

    def __init__(self, **kwargs: Any):
        bind(type(self).__name__, **kwargs)
        super().__init__(**kwargs)
        self.check()

    def check(self) -> None: ...


class SamplingParams(Bound):
    def check(self) -> None:
        assert self.seed.bit_length() <= 64  # the runtime's seed is a uint64


class Logprob(Bound): ...


class CompletionOutput(Bound): ...


class AsyncLLM:
    def __init__(self, *args: Any, **kwargs: Any):
        bound = bind("AsyncLLM.__init__", *args, **kwargs)
        rest = bound.arguments.get("kwargs", {})
        bind("TorchLlmArgs", **rest, orchestrator_type="ray", ray_placement_config=None)
        handed_on = bind("BaseLLM.__init__", **rest).arguments
        self.args = SimpleNamespace(**{**handed_on, **handed_on.pop("kwargs", {})})
        if strikes("out_of_memory"):
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if "folder" in OPTIONS:
            note_arguments(self.args)
        self._asleep: set[str] = set()
        self._received: dict[str, Any] = {}
        self._updates = 0
        self._model: Any = None
        self._workers: list[Any] = []

    async def setup_async(self) -> AsyncLLM:
        bind("AsyncLLM.setup_async")
        from .worker import worker_of

        args = self.args
        ranks = range(args.tensor_parallel_size)
        self._workers = [
            worker_of(
                args.ray_worker_extension_cls,
                Path(args.model),
                args.dtype,
                rank,
                len(ranks),
                partial(self._arrived, rank),
            )
            for rank in ranks
        ]
        if OPTIONS.get("model") == "native":
            from .native_model import NativeModel

            self._model = NativeModel(self.args.model)
        return self

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        bound = bind("AsyncLLM.collective_rpc", *args, **kwargs).arguments
        method = bound["method"]
        if method == "report_device_id":
            return [f"cpu:{rank}" for rank in range(self.args.tensor_parallel_size)]
        assert not self._asleep & {"model", "model_weights"}, (
            "weights came while their memory was given back"
        )
        if strikes("hang"):
            await asyncio.sleep(3600)
        given = bound.get("args", ())
        answers = [getattr(worker, method)(*given) for worker in self._workers]
        if method == "load_bucket" and given == (None,):
            self._finalise()
        return answers

    def _arrived(self, rank: int, weights: dict[str, Any]) -> None:
        if self._model is None or rank:
            return
        for name, tensor in weights.items():
            assert name not in self._received, f"{name} came twice"
            self._received[name] = tensor.clone()

    async def release(self, *args: Any, **kwargs: Any) -> None:
        tags = bind("AsyncLLM.release", *args, **kwargs).arguments["tags"]
        assert not self._asleep
        assert getattr(self.args, "enable_sleep", False) or self.args.sleep_config
        self._check_tags(tags)
        self._asleep.update(tags)
        if hasattr(self.args, "sleep_config"):
            self._lose_dropped(tags)

    async def resume(self, *args: Any, **kwargs: Any) -> None:
        tags = bind("AsyncLLM.resume", *args, **kwargs).arguments["tags"]
        self._check_tags(tags)
        assert self._asleep.issuperset(tags)
        self._asleep.difference_update(tags)

    def _check_tags(self, tags: list[str]) -> None:
        known = SIGNATURES["ExecutorMemoryType"]["values"].values()
        for tag in tags:
            assert tag in known, f"Unknown memory tag '{tag}'"
            assert not tag.startswith("_no_capture"), f"Unknown memory tag '{tag}'"

    def _lose_dropped(self, tags: list[str]) -> None:
        """Fill the weights with NaN, like memory that is restored without its content."""
        import torch

        modes = {kind.value: mode for kind, mode in self.args.sleep_config.restore_modes.items()}
        if "model_weights" in tags and modes["model_weights"] == "NONE":
            for worker in self._workers:
                for parameter in worker.engine.model_engine.model.parameters():
                    torch.nn.init.constant_(parameter, float("nan"))

    def _finalise(self) -> None:
        if self._model is not None:
            from safetensors.torch import save_file

            folder = Path(OPTIONS["folder"])
            number = len(list(folder.glob("names_*.json")))  # earlier engines count too
            save_file(self._received, folder / f"weights_{number}.safetensors")
            names = folder / f"names_{number}.json"
            names.write_text(json.dumps(list(self._received)))
            self._model.load(self._received)
        self._received = {}
        self._updates += 1

    def generate_async(self, *args: Any, **kwargs: Any) -> Result:
        given = bind("BaseLLM.generate_async", *args, **kwargs).arguments
        assert not self._asleep, "asked while it sleeps"
        assert self._updates, "asked without weights"
        if strikes("die"):
            os._exit(13)
        return Result(self._model, given["inputs"], given["sampling_params"])

    def shutdown(self) -> None:
        bind("BaseLLM.shutdown")


class Result:
    def __init__(self, model: Any, inputs: list[int], sampling: SamplingParams):
        self._model = model
        self._inputs = inputs
        self._sampling = sampling
        self.outputs: list[Any] = []
        self.aborted = False

    def abort(self) -> None:
        bind("GenerationResult.abort")
        self.aborted = True

    def __await__(self) -> Any:
        return self._run().__await__()

    async def _run(self) -> Result:
        if strikes("lost"):
            await asyncio.sleep(3600)
        if strikes("slow"):
            await asyncio.sleep(0.5)
        seconds = OPTIONS.get("seconds_a_token", 0.0)
        await asyncio.sleep(seconds * len(self._inputs))
        if self._model is None:
            count = min(3, self._sampling.max_tokens)
            seed = self._sampling.seed
            tokens = [3 + (seed >> 8 * i) % 20 for i in range(count)]
            log_probs = [-1.0] * count
            reason = "length"
        else:
            tokens, log_probs, reason = self._model.complete(self._inputs, self._sampling)
        if strikes("outside"):
            tokens[0] = OUTSIDE
        drawn = zip(tokens, log_probs, strict=True)
        logprobs = [{token: Logprob(logprob=value)} for token, value in drawn]
        output = CompletionOutput(
            index=0, token_ids=tokens, logprobs=logprobs, finish_reason=reason
        )
        self.outputs = [output]
        return self
