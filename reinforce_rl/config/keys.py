"""NeMo-Aligner's renamed or missing keys, and Hydra overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SAVING = "exp_manager.checkpoint_callback_params"
_ADVICE = {  # of keys, each with all below it
    "trainer.reinforce.trt_llm model.reinforce.trt_llm trt_llm": "set generation=tensorrt_llm; see tensorrt_llm",
    "trainer.reinforce.batch_iterator": "set trainer.reinforce.generation_work_queue; it needs no server and no port",
    "combine_rm_and_critic_server remote_critic_rm": "there is no critic; the reward server is remote_rm.reward_model",
    "trainer.ppo model.ppo": "REINFORCE has trainer.reinforce and model.reinforce",
    "trainer.reinforce.model_gbs trainer.reinforce.model_mbs": "see model.global_batch_size, model.micro_batch_size",
    "trainer.max_time": "set exp_manager.max_time_per_run",
    "exp_manager.exp_dir": "set exp_manager.explicit_log_dir",
    "exp_manager.resume_from_checkpoint": "write the checkpoint's name into checkpoints/latest",
    f"{_SAVING}.save_top_k": f"set {_SAVING}.keep_best, and keep_last for the newest",
    f"{_SAVING}.monitor {_SAVING}.mode": f"set {_SAVING}.best_metric and best_mode",
    f"{_SAVING}.save_nemo_on_train_end {_SAVING}.always_save_nemo": f"set {_SAVING}.save_hf_on_train_end",
    "model.reinforce.sampling_params.add_BOS": "set model.data.add_bos",
    "model.peft.restore_from_path model.peft.restore_from_ckpt": "merge the adapter into the model first",
    "model.max_position_embeddings model.data.seq_length": "set model.encoder_seq_length",
    "model.precision model.megatron_amp_O2": "set trainer.precision; bf16 keeps fp32 main weights",
    "rm_model_file": "set reward_model.restore_from_path, a Hugging Face folder",
    "model.reward_standardization": "set reward_model.mean and reward_model.deviation",
    "model.regression": "set reward_model.attribute_weights, by name",
}
_GONE = (  # at any place
    "accelerator logger enable_checkpointing use_distributed_sampler create_checkpoint_callback model_parallel_size "
    "resume_ignore_no_checkpoint filename all_probs compute_logprob adapter_dropout column_init_method "
    "layer_selection weight_tying position_embedding_strategy mcore_gpt overwrite_base_config bucket_cap_mb data_impl "
    "contiguous_grad_buffer splits_string index_mapping_dir skip_warmup reset_position_ids reset_attention_mask "
    "eod_mask_loss row_init_method"
)
_BY_KEY = {key: advice for keys, advice in _ADVICE.items() for key in keys.split()}


def renamed(key: str) -> str | None:
    """Describe the replacement of a NeMo-Aligner key that this project lacks; None for any other key."""
    found = next((advice for known, advice in _BY_KEY.items() if f"{key}.".startswith(f"{known}.")), None)
    if set(_GONE.split()) & set(key.split(".")):
        found = "leave it out: there is nothing to choose"
    return found and f"{key} is a key of NeMo-Aligner; {found} (docs/migration-from-nemo-aligner.md)"


def override_of(args: Sequence[str], key: str) -> str | None:
    """Return the last value that Hydra overrides give to a key."""
    values = [
        value for name, found, value in (arg.partition("=") for arg in args) if found and name.lstrip("+") == key
    ]
    return values[-1] if values else None


def with_missing(args: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return Hydra overrides and, for each key of `values` that they do not set, one more."""
    return [*args, *(f"{key}={value}" for key, value in values.items() if override_of(args, key) is None)]
