"""Build the mesh, the actor and its generator from a checked configuration."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from reinforce_rl.algorithm.loss import LossSettings
from reinforce_rl.config.actor import ReinforceConfig, TrainConfig
from reinforce_rl.config.end_tokens import read_end_tokens
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.config.model import LengthConfig, ModelConfig, ParallelConfig, SamplingConfig
from reinforce_rl.data.tokenizer import token_id
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.generation.base import Generator, RemoteGenerator, SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import check_headers, load_hf_weights
from reinforce_rl.megatron.lora import LoraSettings, add_lora
from reinforce_rl.megatron.mesh import Mesh, World, parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM, ModelOptions
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.utils.console import warn_once
from reinforce_rl.utils.user_class import OR_A_CLASS, import_user_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def configured_mesh(cfg: TrainConfig, role: RankRole | None = None) -> AbstractContextManager[Mesh]:
    """Return a context in which the process groups of the configured layout exist.

    `parallel_mesh` has the details.
    """
    model = cfg.model
    if role is not None and role.generates:
        return generator_mesh(cfg, role.world)
    return parallel_mesh(
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
        sequence_parallel=model.sequence_parallel,
        seed=model.seed,
        timeout_seconds=cfg.torch_timeout_seconds,
        world=None if role is None else role.world,
    )


def generator_mesh(cfg: TrainConfig, world: World | None = None) -> AbstractContextManager[Mesh]:
    """Return the context of a generator's process groups, by default over all ranks of this job."""
    return parallel_mesh(
        cfg.generation_tensor_parallel_size,
        seed=cfg.model.seed,
        timeout_seconds=cfg.torch_timeout_seconds,
        world=world,
    )


DTYPES = {"32": "float32", "bf16": "bfloat16"}


def build_actor(
    cfg: TrainConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    *,
    architecture: Architecture | None = None,
    trains: bool = True,
    with_reference: bool = True,
) -> MegatronGPTReinforceActorModel:
    """Build the policy from `pretrained_checkpoint.restore_from_path`.

    The reference is built if beta is above 0 and `with_reference` is true. If `architecture` is
    given, it overrides the folder's and no weights are loaded. With `trains=False` there are no
    gradient buffers.

    Raises ConfigError: this machine or layout cannot run the model.
    """
    import torch

    on_cpu = mesh.device.type == "cpu"
    if cfg.model.transformer_engine and on_cpu:
        advice = "expected a GPU. Set it to false"
        sentence = f"model.transformer_engine is true, but this rank computes on a CPU; {advice}"
        raise ConfigError([Fault(sentence, key="model.transformer_engine.needs_gpu")])
    folder = cfg.pretrained_checkpoint.restore_from_path
    weights = HFFolder(folder) if architecture is None else None
    architecture = architecture or Architecture.from_folder(folder)
    if weights is not None:
        check_headers(architecture, weights)  # before a model of config.json's size takes memory
    lm = CausalLM(
        architecture, mesh, getattr(torch, DTYPES[cfg.trainer.precision]), model_options(cfg.model)
    )
    if weights is not None:
        load_hf_weights(lm, weights)
    lora = lora_settings(cfg)
    identity = None
    if lora is not None:
        add_lora(lm, lora)
        identity = lora.identity(weights.fingerprint() if weights else "")
    is_remote = trains and cfg.placement == "disaggregated" and cfg.generation != "native"
    rollout = cfg.model.reinforce
    stop_ids = stop_token_ids(folder, tokenizer)
    return MegatronGPTReinforceActorModel(
        lm,
        tokenizer,
        RemoteGenerator() if is_remote else build_generator(cfg, lm, tokenizer),
        cfg.model,
        _sampling_params(rollout.sampling_params, rollout.length_params, stop_ids),
        _sampling_params(rollout.val_sampling_params, rollout.length_params, stop_ids),
        loss=loss_settings(cfg.trainer.reinforce),
        pad_to=cfg.trainer.reinforce.rollout_batch_seq_length or 0,
        with_reference=with_reference and cfg.uses_reference,
        lora=identity,
        trains=trains,
        max_response_tokens=cfg.max_response_tokens,
    )


def build_actor_optimizer(
    cfg: TrainConfig, model: MegatronGPTReinforceActorModel, total_steps: int
) -> ActorOptimizer:
    """Build the optimizer of `model.optim`; its schedule is over `total_steps` optimizer steps."""
    optimizer, scheduler = build_optimizer(
        model.ddp,
        cfg.model.optim,
        clip_grad=cfg.trainer.reinforce.gradient_clip_val,
        total_steps=total_steps,
    )
    actor_optimizer = ActorOptimizer(
        optimizer,
        scheduler,
        model.ddp,
        overlap_restore=cfg.model.reinforce.overlap_offload,
    )
    shares_gpu = cfg.generation in ENGINES and cfg.placement == "colocated"
    if shares_gpu and model.mesh.device.type == "cuda":
        actor_optimizer.allocate_moments()
    return actor_optimizer


def build_generator(
    cfg: TrainConfig, lm: CausalLM, tokenizer: PreTrainedTokenizerBase
) -> Generator:
    """Build the generator that `generation` names.

    A dotted name is a class that takes the arguments of this function.

    Raises ConfigError: no such name, or this machine cannot run it.
    """
    if cfg.generation == "native":
        return NativeGenerator(
            lm,
            tokenizer,
            cfg.model.reinforce.generation_cache_tokens,
            is_lean=cfg.model.reinforce.lean_decoding,
            is_static=cfg.model.reinforce.static_decoding is not False,
            use_graphs=cfg.model.reinforce.cuda_graphs is not False,
        )
    if cfg.generation not in ENGINES:
        try:
            generator_class = import_user_class(cfg.generation)
        except ImportError as error:
            sentence = (
                f"generation is {cfg.generation!r}, which {error}. Expected native, "
                f"{', '.join(ENGINES)}, {OR_A_CLASS}"
            )
            raise ConfigError([Fault(sentence, key="generation.class.not_importable")]) from error
        generator = generator_class(cfg, lm, tokenizer)
        needs_resume = cfg.rollout_order == "finished" or cfg.has_environment
        if needs_resume and not hasattr(generator, "resume"):
            setting = "rollout_order=finished"
            instead = "rollout_order=prompts"
            if cfg.has_environment:
                setting = "an environment"
                instead = "no environment.name"
            sentence = (
                f"{cfg.generation} has no method resume, which {setting} needs; expected one "
                f"(reinforce_rl/generation/base.py), or {instead}"
            )
            raise ConfigError([Fault(sentence, key="generation.class.no_resume")])
        return generator
    from reinforce_rl.generation.engine.generator import EngineGenerator
    from reinforce_rl.generation.trtllm.adapter import TensorRTLLM
    from reinforce_rl.generation.vllm.adapter import VLLM

    return EngineGenerator(
        lm,
        tokenizer,
        VLLM(cfg.vllm) if cfg.generation == "vllm" else TensorRTLLM(cfg.tensorrt_llm),
        cfg.engine,
        model=cfg.pretrained_checkpoint.restore_from_path,
        max_seq_len=cfg.model.encoder_seq_length,
        log_folder=Path(cfg.exp_manager.explicit_log_dir) / "engines",
    )


def model_options(model: ParallelConfig) -> ModelOptions:
    return ModelOptions(
        recompute_granularity=model.activations_checkpoint_granularity,
        recompute_method=model.activations_checkpoint_method,
        recompute_num_layers=model.activations_checkpoint_num_layers,
        transformer_engine=isinstance(model, ModelConfig) and model.transformer_engine,
        overrides=model.megatron_overrides,
    )


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, architecture: Architecture, folder: str | Path
) -> None:
    """Raise ConfigError if the tokenizer of `folder` has tokens that its model cannot embed."""
    size = architecture.vocab_size
    beyond = [(number, token) for token, number in tokenizer.get_vocab().items() if number >= size]
    if beyond:
        number, token = min(beyond)
        sentence = (
            f"the tokenizer of {folder} has {len(tokenizer)} tokens, its model only {size} "
            f"embeddings; the first token without one is {token!r}, id {number}. Is this the "
            "tokenizer of another model? If tokens were added to it, save the model after "
            "resize_token_embeddings"
        )
        raise ConfigError([Fault(sentence, key="tokenizer.tokens.without_embedding")])


def stop_token_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends a response.

    The ids are of generation_config.json, config.json and the tokenizer.

    Logs a warning once if `generate` of transformers would stop at other ids. Raises the errors of
    `read_end_tokens`.
    """
    end_tokens = read_end_tokens(folder, token_id(tokenizer.eos_token_id))
    difference = end_tokens.difference(Path(folder))
    if difference is not None:
        warn_once(difference)
    return end_tokens.ids


def _sampling_params(
    sampling: SamplingConfig, lengths: LengthConfig, stop_ids: tuple[int, ...]
) -> SamplingParams:
    values = {**dict(lengths), **dict(sampling), "end_strings": tuple(sampling.end_strings)}
    return SamplingParams(**values, stop_token_ids=stop_ids)


def lora_settings(cfg: TrainConfig) -> LoraSettings | None:
    """Read `model.peft`; None if the whole model is trained."""
    if cfg.model.peft.peft_scheme is None:
        return None
    tuning = cfg.model.peft.lora_tuning
    return LoraSettings.from_names(
        tuning.adapter_dim, tuning.alpha, tuning.target_modules, cfg.model.seed
    )


def loss_settings(cfg: ReinforceConfig) -> LossSettings:
    values = {name: getattr(cfg, name) for name in LossSettings.__dataclass_fields__}
    resolved = {
        "kl_estimator": cfg.kl_estimator_used,
        "generator_correction": cfg.generator_correction or "none",
    }
    return LossSettings(**{**values, **resolved})
