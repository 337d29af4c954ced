"""Generation by an engine: one per block of ranks, on the devices they train on.

The engine sleeps during training; each wake-up reloads the policy's weights and resets the prefix
cache, so a sleeping engine need not keep either. Model-parallel rank 0 owns the engine process and
shares results and errors with its block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from reinforce_rl.config.engines import EngineConfig
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.data.tokenizer import decode_all, pad_id_of
from reinforce_rl.errors import ConfigError, EngineLostError, Fault, GenerationError
from reinforce_rl.generation.base import (
    PartialResponse,
    Partner,
    SamplingParams,
    WeightUpdates,
    check_lengths,
)
from reinforce_rl.generation.engine import ABORTED, Answer, EngineArguments, Request, process
from reinforce_rl.generation.engine.buckets import checksum
from reinforce_rl.generation.engine.requests import extended, request_of, requests_of
from reinforce_rl.generation.engine.weights import send_weights
from reinforce_rl.megatron.hf_weights import hf_tensors
from reinforce_rl.megatron.lora import (
    PREFIX,
    MergedWeights,
    adapter_rows,
    lora_settings_of,
    write_adapter,
)
from reinforce_rl.megatron.model.model import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLL_SECONDS = 0.2  # between two calls of `WeightUpdates.next_action`
TURN_POLL_SECONDS = 0.02  # between two calls of a `Partner`

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EngineGenerator:
    """A `Generator` on an engine. All ranks of a block create and call it together.

    Args:
        adapter: the trainer's half of the engine's specifics.
        config: section `engine`; `tensor_parallel_size` is at most the block size.
        model: Hugging Face folder of the policy, for the engine's config.
        max_seq_len: prompt and response tokens.

    Raises:
        ConfigError: the engine's package is missing, or there are no suitable devices.
    """

    is_exact = False  # the kernels differ from the trainer's

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        adapter: process.EngineAdapter,
        config: EngineConfig,
        *,
        model: str | Path,
        max_seq_len: int,
        log_folder: Path,
    ):
        self._lm = lm
        self._tokenizer = tokenizer
        self._log_folder = log_folder
        self._adapter = adapter
        self._config = config
        lora = lora_settings_of(lm)
        self._lora = lora if adapter.loads_adapters else None  # sent alone; else merged
        self._arguments = EngineArguments(
            model=str(model),
            dtype=str(lm.config.params_dtype).removeprefix("torch."),
            tensor_parallel_size=config.tensor_parallel_size
            or lm.mesh.tp_size * lm.mesh.pp_size * lm.mesh.cp_size,
            max_batch_size=config.max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=config.max_num_tokens,
            lora_rank=self._lora.rank if self._lora is not None else 0,
            options=adapter.options,
        )
        self._bucket_bytes = config.weight_bucket_megabytes * 2**20
        self._pad_id = pad_id_of(tokenizer)
        self._engine: process.EngineProcess | None = None
        self._hosts_worker = False
        self._is_running = False
        self._is_asleep = False
        self._has_weights = False
        self._is_current = False
        self._was_restarted = False
        self._place_engine()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Wake the engine with the policy's current weights within the block."""
        self._with_one_restart(lambda: self._is_current or self._wake())  # a start ends awake
        try:
            yield
        except BaseException:
            # No collectives: the ranks may have left at different points.
            self._has_weights = False
            self._is_current = False
            raise
        self._sleep()

    def refit(self) -> None:
        """Do nothing: each wake-up loads the weights."""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._is_running = False

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int
    ) -> Completions:
        """See `Generator.generate`. Lost requests are retried once with the same seed."""
        self._check_lengths((len(prompt.tokens), params.max_length) for prompt in prompts)
        requests = requests_of(prompts, num_samples, params, seed, self._pad_id)
        answers = self._with_one_restart(lambda: self._together(partial(_answers, requests)))
        lost = [row for row, answer in enumerate(answers) if answer.fault is not None]
        if lost:
            raise _lost_twice(
                [prompts[row // num_samples] for row in lost], len(requests), answers[lost[0]]
            )
        return self._completions(answers, params)

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        """See `Generator.resume`.

        A lost request is retried once; after a restart, all unfinished responses are.
        """
        self._check_lengths(
            (len(response.prompt.tokens), response.max_length(params)) for response in responses
        )
        results = [
            replace(response, finish_reason=response.finish_reason or FINISH_LENGTH)
            if len(response.tokens) >= response.max_length(params)
            else response
            for response in responses
        ]
        with self._killed_on_failure():
            self._with_one_restart(lambda: self._resume(results, params, updates))
        return results

    def converse(
        self, responses: Sequence[PartialResponse], params: SamplingParams, partner: Partner
    ) -> None:
        """See `ConversingGenerator.converse`.

        A turn is a request, and the engine's prefix cache may have its history. Lost requests and
        restarts are as in `resume`.
        """
        self._check_lengths((len(row.prompt.tokens), row.room(params)) for row in responses)
        turns = dict(enumerate(responses))
        waiting = set[int]()
        with self._killed_on_failure():
            self._with_one_restart(lambda: self._converse(turns, waiting, params, partner))

    @contextlib.contextmanager
    def _killed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._engine is not None:
                # It may be paused, with requests under way.
                self._engine.kill()
            self._is_running = False
            raise

    def _resume(
        self, responses: list[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> None:
        """Replace unfinished responses in the list as answers arrive."""

        cut = partial(self._cut_at_end_string, end_strings=params.end_strings)
        underway = set[int]()
        lost_once = set[int]()
        versions = dict[int, int]()
        while rows := [
            row for row, response in enumerate(responses) if response.finish_reason is None
        ]:
            action = updates.next_action(len(rows))
            begun = dict[int, Request]()
            if action == "load":
                self._take_weights_between_tokens(updates)
            if action == "stop":
                self._together(lambda engine: engine.call("take_back"))
            else:
                begun = {
                    row: request_of(responses[row], params, self._pad_id)
                    for row in rows
                    if row not in underway
                }
            underway |= begun.keys()
            advance = partial(
                _advance, begun, 0.0 if action == "stop" else POLL_SECONDS, len(underway)
            )
            number, answers = self._together(advance)
            versions[number] = updates.version
            for row, answer in answers.items():
                underway.discard(row)
                if answer.fault in (None, ABORTED):
                    responses[row] = extended(responses[row], answer, versions, cut)
                elif row in lost_once:
                    raise _lost_twice([responses[row].prompt], len(rows), answer)
                else:
                    lost_once.add(row)
            if action == "stop":
                return

    def _converse(
        self,
        turns: dict[int, PartialResponse],
        waiting: set[int],
        params: SamplingParams,
        partner: Partner,
    ) -> None:
        """Play all rows to their end.

        Args:
            turns: those without an answer, by row.
            waiting: rows whose answers the partner has.
        """

        cut = partial(self._cut_at_end_string, end_strings=params.end_strings)
        underway = set[int]()
        lost_once = set[int]()
        while turns or waiting:
            begun = {
                row: request_of(turn, params, self._pad_id)
                for row, turn in turns.items()
                if row not in underway
            }
            underway |= begun.keys()
            number = 0
            arrived = dict[int, Answer]()
            if underway:
                advance = partial(_advance, begun, TURN_POLL_SECONDS, len(underway))
                number, arrived = self._together(advance)
            answers = dict[int, PartialResponse]()
            for row, answer in arrived.items():
                underway.discard(row)
                if answer.fault is None:
                    lost_once.discard(row)
                    answers[row] = extended(turns.pop(row), answer, {number: 0}, cut)
                elif row in lost_once:
                    raise _lost_twice([turns[row].prompt], len(turns), answer)
                else:
                    lost_once.add(row)
            waiting |= answers.keys()
            replies = partner(answers, waits=not turns)
            waiting -= replies.keys()
            turns |= {row: turn for row, turn in replies.items() if turn is not None}

    def _take_weights_between_tokens(self, updates: WeightUpdates) -> None:
        self._together(lambda engine: engine.call("pause"))
        updates.load()
        self._outdate_weights()
        self._give_weights()
        self._together(lambda engine: engine.call("resume"))

    def layer_outputs(self, tokens: Sequence[int]) -> list[torch.Tensor] | None:
        """Return a prompt's residual stream after each decoder layer, float32 [tokens, hidden].

        Call within `awake`. Returns None if the engine cannot show them, or if its layers are
        compiled (`vllm.enforce_eager`).
        """
        if not self._adapter.shows_layers:
            return None
        (request,) = requests_of(
            [Prompt(0, "", tuple(tokens))],
            1,
            SamplingParams(max_length=1, use_greedy=True),
            0,
            self._pad_id,
        )
        outputs = self._with_one_restart(
            lambda: self._together(lambda engine: engine.call("layer_outputs", request))
        )
        return [
            torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
            for shape, data in outputs
        ] or None

    def _check_lengths(self, lengths: Iterable[tuple[int, int]]) -> None:
        limit = self._arguments.max_seq_len
        check_lengths(lengths, limit, f"model.encoder_seq_length, which is {limit}")

    def _completions(self, answers: Sequence[Answer], params: SamplingParams) -> Completions:
        cut = [self._cut_at_end_string(answer, params.end_strings) for answer in answers]
        lengths = torch.tensor([len(answer.tokens) for answer in cut], dtype=torch.long)
        width = int(lengths.max()) if len(cut) else 0
        tokens = torch.full((len(cut), width), self._pad_id, dtype=torch.long)
        log_probs = (
            torch.zeros((len(cut), width))
            if all(answer.log_probs is not None for answer in cut)
            else None
        )
        for row, answer in enumerate(cut):
            tokens[row, : len(answer.tokens)] = torch.tensor(answer.tokens, dtype=torch.long)
            if log_probs is not None and answer.log_probs is not None:
                log_probs[row, : len(answer.tokens)] = torch.tensor(answer.log_probs)
        reasons = tuple(FINISH_STOP if answer.stopped else FINISH_LENGTH for answer in cut)
        return Completions(
            tokens=tokens, lengths=lengths, finish_reasons=reasons, log_probs=log_probs
        )

    def _cut_at_end_string(self, answer: Answer, end_strings: Sequence[str]) -> Answer:
        """Cut an answer at the first end string; an engine without a tokenizer cannot.

        Qwen's models can draw ids between the tokenizer's and the model's size, which have no text.
        """
        vocab_size = self._lm.architecture.vocab_size
        known = all(0 <= token < vocab_size for token in answer.tokens)
        whole = decode_all(self._tokenizer, [answer.tokens])[0] if end_strings and known else ""
        is_there = any(end in whole for end in end_strings)
        for count in range(1, len(answer.tokens) + 1) if is_there else ():
            text = decode_all(self._tokenizer, [answer.tokens[:count]])[0]
            if any(end in text for end in end_strings):
                log_probs = None if answer.log_probs is None else answer.log_probs[:count]
                return Answer(answer.tokens[:count], log_probs, stopped=True)
        return answer

    def _wake(self) -> None:
        if self._lm.mesh.device.type == "cuda":
            # The engine needs the memory that the trainer's allocator has cached.
            torch.cuda.empty_cache()
        if not self._is_running:
            foreign = sorted(
                set(self._together(lambda engine: engine.start())) - set(self._devices)
            )
            if foreign:
                raise GenerationError(
                    f"{self._adapter.title} has workers on {', '.join(foreign)}; expected "
                    f"{', '.join(self._devices)}, the devices of this block, where it receives "
                    "weights. Check CUDA_VISIBLE_DEVICES, and that engine.python is an "
                    "environment for this machine",
                    key="generation.engine.wrong_devices",
                )
            self._is_running = True
            self._is_asleep = False
            self._has_weights = False
            self._is_current = False
        if self._is_asleep:
            self._together(lambda engine: engine.call("resume_weights"))
        if not self._is_current:
            self._give_weights()
        if self._is_asleep:
            self._together(lambda engine: engine.call("resume_cache"))
            self._is_asleep = False

    def _give_weights(self) -> None:
        if not self._has_weights:
            self._send_weights()
        if self._lora is not None:
            self._send_adapter()
        self._has_weights = True
        self._is_current = True

    def _send_weights(self) -> None:
        adapter = self._adapter
        device = self._lm.mesh.device

        def deliver(offers: list[Any]) -> None:
            self._together(lambda engine: engine.call("update_weights", adapter.bucket_of(offers)))

        send_weights(
            self._lm,
            deliver,
            max_bytes=self._bucket_bytes,
            make_buffer=lambda elements, dtype: adapter.make_buffer(elements, dtype, device),
            hosts_worker=self._hosts_worker,
            is_spread=len(self._devices) > 1,
            values=None
            if self._lora is not None or lora_settings_of(self._lm) is None
            else MergedWeights(self._lm),
        )
        self._together(lambda engine: engine.call("update_weights", None))

    def _send_adapter(self) -> None:
        """Send only the LoRA updates, as PEFT's folder."""
        settings = self._lora
        assert settings is not None
        mesh = self._lm.mesh
        scale = settings.scale
        sums = {}
        matrices = {}
        rows = adapter_rows(self._lm)
        tensors = (
            hf_tensors(self._lm, rows=rows, dtype=self._lm.config.params_dtype)
            if mesh.cp_rank == 0
            else ()
        )
        for name, tensor in tensors:
            if tensor is not None:
                matrices[PREFIX + name] = tensor
                sums[name] = checksum(tensor * scale if name.endswith("lora_B.weight") else tensor)
        self._together(
            lambda engine: engine.load_adapter(
                lambda folder: write_adapter(matrices, settings, self._arguments.model, folder),
                sums,
            )
        )

    def _sleep(self) -> None:
        self._outdate_weights()
        try:
            self._together(lambda engine: engine.call("release"))
            self._is_asleep = True
        except EngineLostError as error:
            # A dead engine has freed its memory, and the next wake-up starts another.
            self._count_restart(error)

    def _outdate_weights(self) -> None:
        # LoRA leaves the frozen weights as they are.
        self._has_weights = self._lora is not None
        self._is_current = False

    def _with_one_restart(self, action: Callable[[], T]) -> T:
        """Run `action`; once per run, retry it on a new engine with the current weights.

        Raises:
            GenerationError: the engine does not start, or fails a second time.
        """
        while True:
            try:
                if not self._is_running:
                    self._wake()
                return action()
            except EngineLostError as error:
                self._count_restart(error)

    def _count_restart(self, error: EngineLostError) -> None:
        self._is_running = False
        if self._was_restarted:
            raise GenerationError(
                f"{self._adapter.title} failed again after a restart: {error}. See its log",
                key="generation.engine.failed_again",
            ) from error
        self._was_restarted = True
        if self._engine is not None:
            logger.warning("event=engine_restarted reason=%s", error)

    def _together(self, action: Callable[[process.EngineProcess], T]) -> T:
        """Run `action` on model-parallel rank 0 and return its result on all ranks of the block.

        Raises:
            GenerationError: `action` failed; raised on all ranks.
        """
        result = None
        failure = None
        if self._engine is not None:
            try:
                result = action(self._engine)
            except GenerationError as error:
                failure = error
            except OSError as error:
                failure = GenerationError(
                    f"files of {self._adapter.title} cannot be written: {error}",
                    key="generation.engine.files_not_written",
                )
        result, failure = self._lm.mesh.from_model_parallel_rank_0((result, failure))
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def _place_engine(self) -> None:
        mesh = self._lm.mesh
        adapter = self._adapter
        arguments = self._arguments
        device = adapter.device_id(mesh.device)
        local_place = socket.gethostname(), _number_of(mesh.device, adapter.name), device
        places = mesh.from_model_parallel_rank_0(mesh.gather_on_model_parallel_rank_0(local_place))
        hosts = sorted({host for host, _, _ in places})
        if len(hosts) > 1:
            sentence = (
                f"generation is {adapter.name}, but the ranks of one block are on {len(hosts)} "
                f"nodes: {', '.join(hosts)}; an engine can use the devices of one node only: lower "
                "the model-parallel sizes"
            )
            raise ConfigError([Fault(sentence, key="generation.engine.several_nodes")])
        used = places[: arguments.tensor_parallel_size]
        self._devices = list(dict.fromkeys(device for _, _, device in used))
        # Without GPUs all ranks have the same device, and model-parallel rank 0 sends weights to
        # every worker.
        gives_weights = len(self._devices) > 1 or mesh.is_model_parallel_rank_0
        self._hosts_worker = device in self._devices and gives_weights
        fault = None
        if mesh.is_model_parallel_rank_0:
            numbers = [number for _, number, _ in used if number is not None] or None
            log = self._log_folder / f"dp_{mesh.dp_rank:05d}.log"
            try:
                self._engine = process.EngineProcess(
                    adapter, arguments, self._config, log, mesh.dp_rank, numbers
                )
            except ConfigError as error:
                fault = error
        if (fault := mesh.from_model_parallel_rank_0(fault)) is not None:
            raise fault


def _answers(requests: Sequence[Request], engine: process.EngineProcess) -> list[Answer]:
    answers = engine.generate(requests)
    lost = [row for row, answer in enumerate(answers) if answer.fault is not None]
    _check_lost(engine, [answers[row] for row in lost], len(answers))
    for row, answer in zip(
        lost, engine.generate([requests[row] for row in lost]) if lost else (), strict=True
    ):
        answers[row] = answer
    return answers


def _advance(
    begun: Mapping[int, Request], wait: float, count: int, engine: process.EngineProcess
) -> tuple[int, dict[int, Answer]]:
    """See `RequestsUnderway.advance`; `count` requests are under way."""
    number, answers = engine.advance(begun, wait)
    _check_lost(
        engine,
        [answer for answer in answers.values() if answer.fault not in (None, ABORTED)],
        count,
    )
    return number, answers


def _check_lost(engine: process.EngineProcess, lost: Sequence[Answer], count: int) -> None:
    """Log the lost requests among `count`; kill an engine that lost all of them."""
    # The engine hangs, rather than a request.
    if lost and len(lost) == count:
        engine.kill()
        raise EngineLostError(
            f"the engine lost all {count} requests: {lost[0].fault}",
            key="generation.engine.lost_all_requests",
        )
    if lost:
        logger.warning("event=requests_lost count=%d reason=%s", len(lost), lost[0].fault)


def _lost_twice(prompts: Sequence[Prompt], count: int, answer: Answer) -> GenerationError:
    ids = sorted({prompt.id for prompt in prompts})
    return GenerationError(
        f"the engine lost {len(prompts)} of {count} requests twice, of the prompts {ids[:10]}: "
        f"{answer.fault}. If they are slow rather than lost, raise engine.request_timeout_seconds",
        key="generation.engine.lost_requests_twice",
    )


def _number_of(device: torch.device, generation: str) -> str | None:
    """Return a GPU's index on this machine as other processes see it; None for other devices.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has names in place of numbers, which not every engine
            reads.
    """
    if device.type != "cuda":
        return None
    visible = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    number = visible[device.index or 0] if visible else str(device.index or 0)
    if not number.isdigit():
        sentence = (
            f"CUDA_VISIBLE_DEVICES has {number!r}; expected numbers, as generation is {generation}"
        )
        raise ConfigError([Fault(sentence, key="generation.devices.not_numbers")])
    return number
