"""NeMo-Aligner's keys that this project does not have, with their replacements.

From examples/nlp/gpt/conf (gpt_reinforce_actor.yaml, inference_rm.yaml, training_rm.yaml),
docs/user-guide and tests/functional of NVIDIA/NeMo-Aligner. Advice applies to a key and all keys
below it; where several apply, the longest key decides.
"""

from __future__ import annotations

_SAVING = "exp_manager.checkpoint_callback_params"
_NOTHING = "leave it out: there is nothing to choose"
_ONE_FORM = "leave it out: checkpoints have one format"
_OF_TRT_LLM = "leave it out; generation=tensorrt_llm has engine.* and tensorrt_llm.* to choose from"

# Names of the actor's keys to ours, for the same values.
RENAMED = {
    "trainer.reinforce.batch_iterator.use_flask": "trainer.reinforce.generation_work_queue",
    "trainer.max_time": "exp_manager.max_time_per_run",
    "exp_manager.exp_dir": "exp_manager.explicit_log_dir",
    f"{_SAVING}.save_top_k": f"{_SAVING}.keep_best",
    f"{_SAVING}.monitor": f"{_SAVING}.best_metric",
    f"{_SAVING}.mode": f"{_SAVING}.best_mode",
    f"{_SAVING}.save_nemo_on_train_end": f"{_SAVING}.save_hf_on_train_end",
    "model.reinforce.sampling_params.add_BOS": "model.data.add_bos",
    "model.reinforce.entropy_bonus": "trainer.reinforce.entropy_bonus",
    "model.offload_adam_states": "model.reinforce.offload_adam_states",
}

ACTOR = {key: f"set {ours}" for key, ours in RENAMED.items()} | {
    "trainer.reinforce.trt_llm": _OF_TRT_LLM,
    "trainer.reinforce.trt_llm.enable": "set generation=tensorrt_llm",
    "trainer.reinforce.trt_llm.max_input_len": "leave it out: model.encoder_seq_length bounds "
    "prompt and response",
    "trainer.reinforce.trt_llm.seed": "set model.seed, from which generation follows too",
    "trainer.reinforce.batch_iterator": "set trainer.reinforce.generation_work_queue; it needs no "
    "server and no port",
    "trainer.reinforce.flask_server": "set trainer.reinforce.generation_work_queue; it needs no "
    "server and no port",
    "trainer.reinforce.model_gbs": "set model.global_batch_size",
    "trainer.reinforce.model_mbs": "set model.micro_batch_size",
    "trainer.max_epochs": "set trainer.reinforce.max_epochs",
    "trainer.max_steps": "set trainer.reinforce.max_steps",
    "trainer.ppo": "REINFORCE has trainer.reinforce",
    "model.ppo": "REINFORCE has model.reinforce",
    "model.reinforce.ratio_eps": (
        "set trainer.reinforce.ratio_clip_low and trainer.reinforce.ratio_clip_high, with an "
        "importance_ratio"
    ),
    "combine_rm_and_critic_server": "leave it out: there is no critic; the reward server is "
    "remote_rm.reward_model",
    "remote_critic_rm": "there is no critic; the reward server is remote_rm.reward_model",
    "exp_manager.resume_from_checkpoint": "write the checkpoint's name into checkpoints/latest",
    f"{_SAVING}.save_top_k": f"set {_SAVING}.keep_best, and keep_last for the newest",
    f"{_SAVING}.always_save_nemo": f"set {_SAVING}.save_hf_on_train_end",
    "model.peft.restore_from_path": "merge the adapter into the model first",
    "model.peft.restore_from_ckpt": "merge the adapter into the model first",
    "model.max_position_embeddings": "set model.encoder_seq_length",
    "model.data.seq_length": "set model.encoder_seq_length",
    "model.precision": "set trainer.precision; bf16 keeps fp32 main weights",
    "model.megatron_amp_O2": "set trainer.precision; bf16 keeps fp32 main weights",
    "model.data.num_workers": _NOTHING,
    "rm_model_file": "give it to the reward server, as reward_model.restore_from_path",
}
ACTOR |= {
    key.replace("trainer.reinforce", "model.reinforce"): advice
    for key, advice in ACTOR.items()
    if key.startswith("trainer.reinforce.trt_llm")
}
ACTOR["trt_llm"] = _OF_TRT_LLM

SERVER = {
    "trainer": _NOTHING,
    "trainer.num_nodes": "set num_nodes",
    "trainer.devices": "set devices",
    "trainer.precision": "set reward_model.precision",
    "inference.model_name": "set inference.name",
    "inference.max_queue_delay_microseconds": "set inference.max_queue_delay_ms, a thousandth of "
    "the value",
    "inference.inference_micro_batch_size": "set inference.preferred_batch_sizes, a list",
    "inference.strip_sequence_length_to_multiple": "set inference.pad_to_multiple; null there is 1",
    "rm_model_file": "set reward_model.restore_from_path, a Hugging Face folder",
    "model.forward_micro_batch_size": "set inference.micro_batch_size",
    "model.micro_batch_size": "set inference.micro_batch_size",
    "model.global_batch_size": "leave it out: inference.max_batch_size bounds a request",
    "model.tensor_model_parallel_size": "set reward_model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size": "set reward_model.pipeline_model_parallel_size",
    "model.sequence_parallel": "set reward_model.sequence_parallel",
    "model.precision": "set reward_model.precision",
    "model.megatron_amp_O2": "set reward_model.precision",
    "model.encoder_seq_length": "set reward_model.max_length",
    "model.activations_checkpoint_granularity": "leave it out: a server has no backward pass",
    "model.activations_checkpoint_method": "leave it out: a server has no backward pass",
    "model.activations_checkpoint_num_layers": "leave it out: a server has no backward pass",
    "model.reward_standardization": "set reward_model.mean and reward_model.std",
    "model.reward_standardization.mean": "set reward_model.mean",
    "model.reward_standardization.std": "set reward_model.std",
    "model.regression": "set reward_model.attribute_weights, by name",
    "model.regression.num_attributes": "leave it out: the folder's head says how many there are",
    "model.regression.merge_attributes": (
        "leave it out: the reward is always merged, by reward_model.attribute_weights, with the "
        "attributes beside it"
    ),
}

REWARD_MODEL = {
    "pretrained_checkpoint": "set model.restore_from_path, a Hugging Face folder",
    "trainer.rm": "see full.*",
    "trainer.rm.max_epochs": "set full.max_epochs, with mode=full",
    "trainer.rm.max_steps": "set full.max_steps, with mode=full",
    "trainer.rm.val_check_interval": "set full.val_check_interval, with mode=full",
    "trainer.rm.save_interval": "leave it out: a checkpoint follows each evaluation, "
    "full.val_check_interval",
    "trainer.rm.gradient_clip_val": "set full.gradient_clip_val, with mode=full",
    "trainer.rm.limit_val_batches": "leave it out: all held-out examples count; see "
    "data.held_out_fraction",
    "trainer.rm.train_random_sampler": "leave it out: the order is drawn by seed",
    "trainer.rm.val_random_sampler": _NOTHING,
    "trainer.max_epochs": "set full.max_epochs, with mode=full",
    "trainer.max_steps": "set full.max_steps, with mode=full",
    "trainer.max_time": "leave it out: a run resumes from its checkpoints, full.resume_if_exists",
    "exp_manager": "leave it out; output_dir has the files of a run",
    "exp_manager.explicit_log_dir": "set output_dir",
    "exp_manager.exp_dir": "set output_dir",
    "exp_manager.resume_if_exists": "set full.resume_if_exists",
    f"{_SAVING}.save_top_k": "set full.keep_last; the best one is kept as well",
    "model.reward_model_type": "set full.objective: binary_ranking is ranking",
    "model.regression": "set full.attributes, by name, with full.objective=regression",
    "model.regression.loss_mask_val": "leave it out: an attribute that nobody rated is null or "
    "missing",
    "model.regression.loss_func": "set full.objective: regression, or ranking in place of "
    "regular_bt",
    "model.use_avg_pool": "set full.pooling: mean in place of True, last in place of False",
    "model.output_sequence": _NOTHING,
    "model.force_head_dtype": _NOTHING,
    "model.share_embeddings_and_output_weights": _NOTHING,
    "model.micro_batch_size": "set micro_batch_size",
    "model.forward_micro_batch_size": "set micro_batch_size",
    "model.global_batch_size": "set full.global_batch_size",
    "model.encoder_seq_length": "set data.max_length",
    "model.max_position_embeddings": "set data.max_length",
    "model.seed": "set seed",
    "model.precision": "set trainer.precision; bf16 keeps fp32 main weights",
    "model.megatron_amp_O2": "set trainer.precision; bf16 keeps fp32 main weights",
    "model.data": "leave it out; see data.*",
    "model.data.data_prefix": (
        "set data.pairs_path or data.ratings_path; reinforce-rl prepare --format pairs or ratings "
        "converts its files"
    ),
}

# With a value of false or null.
IF_OFF = {
    "trainer.reinforce.trt_llm.enable": "leave it out: generation=native, the default, runs "
    "without TensorRT-LLM",
    "trainer.reinforce.batch_iterator.use_flask": "leave it out: the work queue is off by default",
    "trainer.reinforce.flask_server.enable": "leave it out: the work queue is off by default",
    "model.reward_standardization.enable": "leave it out: there is none by default, but for what "
    "the head's file says",
    "model.reward_standardization.mean": "leave it out: null, the default, is the head's own",
    "model.reward_standardization.std": "leave it out: null, the default, is the head's own",
    "model.regression.attribute_weights": "leave it out: null, the default, is the mean of the "
    "attributes",
    "rm_model_file": "set reward_model.restore_from_path, a Hugging Face folder",
}

# At any place of a key.
GONE = dict.fromkeys(
    [
        "accelerator",
        "logger",
        "enable_checkpointing",
        "use_distributed_sampler",
        "create_checkpoint_callback",
        "model_parallel_size",
        "resume_ignore_no_checkpoint",
        "filename",
        "all_probs",
        "compute_logprob",
        "adapter_dropout",
        "column_init_method",
        "layer_selection",
        "weight_tying",
        "position_embedding_strategy",
        "mcore_gpt",
        "overwrite_base_config",
        "bucket_cap_mb",
        "data_impl",
        "contiguous_grad_buffer",
        "splits_string",
        "index_mapping_dir",
        "skip_warmup",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "row_init_method",
        "enable_nge",
        "shuffle_documents",
        "ub_tp_comm_overlap_cfg",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
    ],
    _NOTHING,
)
GONE |= dict.fromkeys(["dist_ckpt_format", "dist_ckpt_load_strictness"], _ONE_FORM)
