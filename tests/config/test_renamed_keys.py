"""Unknown keys are reported in one message; NeMo-Aligner's keys with their replacement."""

from __future__ import annotations

import re

import pytest
from helpers.errors import check_fault
from helpers.tiny_run import compose
from omegaconf import OmegaConf

from reinforce_rl.config import nemo_keys
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.compose import compose as compose_or_explain
from reinforce_rl.config.load import advice_for, read_config, renamed
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.errors import ConfigError, key_of

# Keys of gpt_reinforce_actor.yaml and inference_rm.yaml in examples/nlp/gpt/conf of
# NVIDIA/NeMo-Aligner that do not exist here.
_TEXT = """
trainer.accelerator trainer.logger trainer.enable_checkpointing trainer.use_distributed_sampler
trainer.max_time trainer.reinforce.trt_llm.enable trainer.reinforce.trt_llm.reshard
trainer.reinforce.trt_llm.max_input_len trainer.reinforce.trt_llm.seed
trainer.reinforce.trt_llm.model_type trainer.reinforce.trt_llm.unload_engine_train
trainer.reinforce.batch_iterator.use_flask trainer.reinforce.batch_iterator.port
trainer.reinforce.model_gbs trainer.reinforce.model_mbs exp_manager.exp_dir
exp_manager.resume_from_checkpoint exp_manager.resume_ignore_no_checkpoint
exp_manager.create_checkpoint_callback exp_manager.checkpoint_callback_params.monitor
exp_manager.checkpoint_callback_params.save_top_k exp_manager.checkpoint_callback_params.mode
exp_manager.checkpoint_callback_params.always_save_nemo
exp_manager.checkpoint_callback_params.save_nemo_on_train_end
exp_manager.checkpoint_callback_params.filename
exp_manager.checkpoint_callback_params.model_parallel_size model.reinforce.sampling_params.add_BOS
model.reinforce.sampling_params.all_probs model.reinforce.sampling_params.compute_logprob
model.reinforce.trt_llm model.peft.restore_from_path model.peft.restore_from_ckpt.checkpoint_dir
model.peft.restore_from_ckpt.checkpoint_name model.peft.lora_tuning.adapter_dropout
model.peft.lora_tuning.column_init_method model.peft.lora_tuning.row_init_method
model.peft.lora_tuning.layer_selection model.peft.lora_tuning.weight_tying
model.peft.lora_tuning.position_embedding_strategy model.mcore_gpt model.megatron_amp_O2
model.max_position_embeddings model.optim.bucket_cap_mb model.optim.contiguous_grad_buffer
model.precision model.data.data_impl model.data.splits_string model.data.seq_length
model.data.skip_warmup model.data.reset_position_ids model.data.reset_attention_mask
model.data.eod_mask_loss model.data.index_mapping_dir model.overwrite_base_config.data.data_prefix
combine_rm_and_critic_server remote_critic_rm.reward_model.ip trainer.ppo.max_steps
model.ppo.num_rollout_samples trainer.max_epochs trainer.max_steps model.reinforce.trt_llm.enable
model.data.num_workers
"""
NEMO_ALIGNER = _TEXT.split()
# Keys of its inference_rm.yaml and training_rm.yaml that do not exist here.
OF_ITS_SERVER = [
    "trainer.num_nodes",
    "trainer.devices",
    "trainer.accelerator",
    "trainer.logger",
    "trainer.precision",
    "inference.model_name",
    "inference.max_queue_delay_microseconds",
    "inference.inference_micro_batch_size",
    "inference.strip_sequence_length_to_multiple",
    "rm_model_file",
    "model.forward_micro_batch_size",
    "model.sequence_parallel",
    "model.activations_checkpoint_granularity",
    "model.activations_checkpoint_method",
    "model.precision",
    "model.reward_standardization.enable",
    "model.reward_standardization.mean",
    "model.reward_standardization.std",
    "model.regression.merge_attributes",
    "model.regression.attribute_weights",
    "model.global_batch_size",
]
OF_ITS_REWARD_MODEL = [
    "trainer.accelerator",
    "trainer.rm.max_epochs",
    "trainer.rm.max_steps",
    "trainer.rm.val_check_interval",
    "trainer.rm.save_interval",
    "trainer.rm.train_random_sampler",
    "trainer.rm.val_random_sampler",
    "trainer.rm.limit_val_batches",
    "trainer.rm.gradient_clip_val",
    "trainer.logger",
    "trainer.enable_checkpointing",
    "trainer.use_distributed_sampler",
    "trainer.max_time",
    "trainer.max_epochs",
    "trainer.max_steps",
    "exp_manager.explicit_log_dir",
    "exp_manager.exp_dir",
    "exp_manager.name",
    "exp_manager.max_time_per_run",
    "exp_manager.create_wandb_logger",
    "exp_manager.wandb_logger_kwargs.project",
    "exp_manager.wandb_logger_kwargs.name",
    "exp_manager.resume_from_checkpoint",
    "exp_manager.resume_if_exists",
    "exp_manager.resume_ignore_no_checkpoint",
    "exp_manager.create_checkpoint_callback",
    "exp_manager.checkpoint_callback_params.monitor",
    "exp_manager.checkpoint_callback_params.save_top_k",
    "exp_manager.checkpoint_callback_params.mode",
    "exp_manager.checkpoint_callback_params.always_save_nemo",
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    "exp_manager.checkpoint_callback_params.filename",
    "exp_manager.checkpoint_callback_params.model_parallel_size",
    "pretrained_checkpoint.restore_from_path",
    "model.mcore_gpt",
    "model.share_embeddings_and_output_weights",
    "model.reward_model_type",
    "model.regression.num_attributes",
    "model.regression.merge_attributes",
    "model.regression.attribute_weights",
    "model.regression.loss_mask_val",
    "model.regression.loss_func",
    "model.regression.load_rm_head_weights",
    "model.output_sequence",
    "model.use_avg_pool",
    "model.force_head_dtype",
    "model.micro_batch_size",
    "model.global_batch_size",
    "model.megatron_amp_O2",
    "model.forward_micro_batch_size",
    "model.encoder_seq_length",
    "model.max_position_embeddings",
    "model.seed",
    "model.optim.bucket_cap_mb",
    "model.optim.contiguous_grad_buffer",
    "model.data.data_impl",
    "model.data.splits_string",
    "model.data.seq_length",
    "model.data.skip_warmup",
    "model.data.num_workers",
    "model.data.reset_position_ids",
    "model.data.reset_attention_mask",
    "model.data.eod_mask_loss",
    "model.data.index_mapping_dir",
    "model.data.data_prefix",
    "model.precision",
    "model.overwrite_base_config.data.data_prefix",
]

# Its documented commands: docs/user-guide/reinforce.rst, and tests/functional/reinforce.sh and
# rm.sh. File names are made up.
USER_GUIDE = [
    "model.data.data_prefix={train:[a.jsonl],validation:[b.jsonl],test:[b.jsonl]}",
    "pretrained_checkpoint.restore_from_path=sft.nemo",
    "exp_manager.checkpoint_callback_params.save_top_k=1",
    "exp_manager.explicit_log_dir=results",
    "trainer.reinforce.max_epochs=1",
    "trainer.reinforce.max_steps=313",
    "trainer.reinforce.val_check_interval=4",
    "trainer.num_nodes=1",
    "trainer.devices=8",
    "trainer.reinforce.trt_llm.enable=True",
    "trainer.reinforce.trt_llm.reshard=True",
    "trainer.reinforce.trt_llm.unload_engine_train=False",
    "++model.tensor_model_parallel_size=4",
    "++model.reinforce.num_rollout_samples=32",
    "model.global_batch_size=32",
    "model.micro_batch_size=1",
    "model.optim.lr=${multiply:1e-6,1.001}",
    "model.optim.sched.warmup_steps=0",
    "model.optim.sched.constant_steps=312",
    "model.optim.sched.min_lr=1e-6",
    "model.optim.weight_decay=0.01",
    "model.reinforce.rollout_micro_batch_size=16",
    "model.reinforce.forward_micro_batch_size=16",
    "model.reinforce.val_rollout_micro_batch_size=8",
    "model.data.data_impl=jsonl",
    "remote_rm.reward_model.ip=localhost",
    "remote_rm.reward_model.port=5555",
    "++model.reinforce.length_params.max_length=2048",
    "trainer.reinforce.initial_policy_kl_penalty=0.01",
    "++model.optim.bucket_cap_mb=200",
    "++model.dist_ckpt_format=zarr",
    "++model.optim.overlap_grad_sync=False",
    "++model.optim.contiguous_grad_buffer=True",
    "++model.enable_nge=True",
    "trainer.reinforce.batch_iterator.use_flask=False",
    "trainer.reinforce.rollout_batch_seq_length=4096",
]
FUNCTIONAL_TEST = [
    "++model.data.data_prefix={train:[a.jsonl],validation:[a.jsonl],test:[a.jsonl]}",
    "pretrained_checkpoint.restore_from_path=tiny.nemo",
    "exp_manager.explicit_log_dir=results",
    "exp_manager.create_wandb_logger=True",
    "exp_manager.wandb_logger_kwargs.name=reinforce_test_actor",
    "exp_manager.wandb_logger_kwargs.project=reinforce_test",
    "exp_manager.create_checkpoint_callback=True",
    "trainer.num_nodes=1",
    "trainer.devices=2",
    "trainer.reinforce.trt_llm.enable=False",
    "++model.offload_adam_states=False",
    "trainer.reinforce.trt_llm.reshard=True",
    "trainer.reinforce.val_check_interval=2",
    "++trainer.reinforce.save_interval=2",
    "++model.micro_batch_size=1",
    "++model.global_batch_size=2",
    "++model.tensor_model_parallel_size=1",
    "++model.pipeline_model_parallel_size=2",
    "++model.reinforce.entropy_bonus=0.0",
    "++model.reinforce.ratio_eps=0.2",
    "++model.encoder_seq_length=64",
    "++exp_manager.checkpoint_callback_params.save_top_k=10",
    "++model.reinforce.num_rollout_samples=2",
    "++model.reinforce.rollout_micro_batch_size=1",
    "++model.reinforce.length_params.max_length=32",
    "++model.reinforce.forward_micro_batch_size=1",
    "trainer.reinforce.initial_policy_kl_penalty=0.03",
    "trainer.reinforce.rollout_batch_seq_length=32",
    "++trainer.reinforce.flask_server.enable=True",
    "++model.optim.lr=9e-7",
    "++model.optim.sched.min_lr=9e-7",
    "++model.activations_checkpoint_granularity=full",
    "++model.activations_checkpoint_method=uniform",
    "++model.activations_checkpoint_num_layers=1",
    "++model.optim.bucket_cap_mb=200",
    "++model.optim.overlap_grad_sync=False",
    "++model.optim.contiguous_grad_buffer=True",
    "++model.enable_nge=True",
    "remote_rm.reward_model.ip=localhost",
    "remote_rm.reward_model.port=5555",
    "+model.overwrite_base_config.optim=True",
    "~model.optim",
    "++model.optim={name:sgd}",
    "model.reinforce.sampling_params.use_greedy=True",
    "trainer.reinforce.save_interval=0",
    "trainer.reinforce.max_steps=3",
    "trainer.reinforce.trt_llm.model_type=llama",
    "++model.dist_ckpt_load_strictness=log_all",
]
SERVER_COMMAND = [
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "inference.port=5555",
    "++model.tensor_model_parallel_size=1",
    "++model.pipeline_model_parallel_size=1",
    "++model.dist_ckpt_load_strictness=log_all",
    "rm_model_file=rm.nemo",
    "++model.regression.merge_attributes=True",
    "++model.regression.attribute_weights=[0.3,0.7]",
    "++model.forward_micro_batch_size=4",
]
REWARD_MODEL_COMMAND = [
    "trainer.num_nodes=1",
    "trainer.devices=2",
    "model.global_batch_size=4",
    "++model.data.data_impl=jsonl",
    "++model.data.train_ds.shuffle=False",
    "++model.data.validation_ds.shuffle=False",
    "++model.data.shuffle_documents=False",
    "model.data.data_prefix={train:[a.jsonl],validation:[a.jsonl],test:[a.jsonl]}",
    "trainer.rm.val_check_interval=1",
    "exp_manager.create_wandb_logger=False",
    "exp_manager.wandb_logger_kwargs.name=rm_test",
    "exp_manager.wandb_logger_kwargs.project=rm_test",
    "exp_manager.explicit_log_dir=results",
    "exp_manager.checkpoint_callback_params.save_top_k=2",
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
    "pretrained_checkpoint.restore_from_path=base.nemo",
    "trainer.rm.save_interval=1",
    "trainer.rm.max_steps=1",
    "model.optim.lr=9e-7",
    "model.optim.sched.min_lr=9e-7",
    "model.optim.sched.constant_steps=0",
    "model.optim.sched.warmup_steps=10",
    "++model.tensor_model_parallel_size=1",
    "++model.pipeline_model_parallel_size=1",
    "++model.activations_checkpoint_granularity=full",
    "++model.activations_checkpoint_method=uniform",
    "++model.activations_checkpoint_num_layers=1",
    "++model.sequence_parallel=False",
    "model.reward_model_type=regression",
    "++model.dist_ckpt_load_strictness=log_all",
    "model.regression.num_attributes=9",
]


def dotted(node: object, prefix: str = "") -> set[str]:
    """Return the dotted names of keys and groups."""
    if not isinstance(node, dict):
        return {prefix}
    return {prefix} | {
        key for name, child in node.items() for key in dotted(child, f"{prefix}.{name}".lstrip("."))
    }


OURS = dotted(OmegaConf.to_container(compose()))
OF_SERVER = dotted(OmegaConf.to_container(compose(name="serve_reward_model")))


OF_REWARD_MODEL = dotted(OmegaConf.to_container(compose(name="train_reward_model")))
PROGRAMS = [
    ("train_reinforce_actor", TrainConfig, NEMO_ALIGNER, OURS),
    ("serve_reward_model", ServeRewardModelConfig, OF_ITS_SERVER, OF_SERVER),
    ("train_reward_model", TrainRewardModelConfig, OF_ITS_REWARD_MODEL, OF_REWARD_MODEL),
]


@pytest.mark.parametrize(
    ("name", "schema", "theirs", "ours"), PROGRAMS, ids=[program[0] for program in PROGRAMS]
)
def test_every_key_of_nemo_aligner_is_answered_and_none_of_ours(name, schema, theirs, ours):
    assert [key for key in theirs if renamed(key, schema) is None] == []
    assert [key for key in ours if key and renamed(key, schema)] == []
    assert (
        renamed("model.optim.shufle", schema)
        is renamed("trt_llms", schema)
        is renamed("", schema)
        is None
    )


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        (nemo_keys.ACTOR, OURS | {"reward_model.restore_from_path"}),
        (nemo_keys.SERVER, OF_SERVER),
        (nemo_keys.REWARD_MODEL, OF_REWARD_MODEL),
        (nemo_keys.IF_OFF, OF_SERVER),
    ],
    ids=["actor", "server", "reward model", "if off"],
)
def test_the_answers_name_existing_keys(table, keys):
    named = {
        key for advice in table.values() for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice)
    }
    assert named - keys == set()
    bare = {
        key for advice in table.values() for key in re.findall(r"set ([a-z_]+)\b(?!\.)", advice)
    }
    assert bare - keys == set()


@pytest.mark.parametrize("off", ["False", "false", "null", False, None])
def test_what_is_switched_off_is_left_out(off):
    key = "trainer.reinforce.trt_llm.enable"
    assert "generation=native" in str(advice_for(key, value=off))
    assert "tensorrt_llm" not in str(advice_for(key, value=off))
    assert advice_for(key, value="True") == advice_for(key) == "set generation=tensorrt_llm"
    faults = read_config(compose(f"++{key}={off}"))[1]
    (fault,) = [fault for fault in faults if key_of(fault) == "config.key.renamed"]
    assert fault.startswith(f"{key} ")
    assert "generation=native" in fault


COMMANDS = {
    "user guide": ("train_reinforce_actor", USER_GUIDE),
    "functional test": ("train_reinforce_actor", FUNCTIONAL_TEST),
    "server": ("serve_reward_model", SERVER_COMMAND),
    "reward model": ("train_reward_model", REWARD_MODEL_COMMAND),
}


@pytest.mark.parametrize(("name", "words"), COMMANDS.values(), ids=COMMANDS)
def test_its_own_commands_are_answered_in_one_round(name, words):
    """A second round without the reported keys reports nothing new."""
    with pytest.raises(ConfigError) as raised:
        compose_or_explain(name, words)
    faults = raised.value.faults
    answered = {fault.split(" ")[0].rstrip(":") for fault in faults}
    assert len(answered) == len(faults), "once each"
    assert "config.key.unknown" not in raised.value.keys
    ours = dict((program, keys) for program, _, _, keys in PROGRAMS)[name]
    given = {word.partition("=")[0].lstrip("+") for word in words if word[0] != "~"}
    deleted = tuple(f"{word[1:]}." for word in words if word[0] == "~")
    assert {key for key in given if key not in ours and not key.startswith(deleted)} <= answered

    kept = [word for word in words if word.partition("=")[0].lstrip("+") not in answered]
    composed = compose_or_explain(name, kept)
    schema = dict((program, schema) for program, schema, _, _ in PROGRAMS)[name]
    later = [fault.split(" ")[0].rstrip(":") for fault in read_config(composed, schema)[1]]
    assert [key for key in later if key in given and key not in answered] == []


NOT_GIVEN = {"pretrained_checkpoint.restore_from_path", "model.data.data_prefix.train"}


def given_ones(error: ConfigError) -> list[str]:
    """Return the faults of keys that were given, without missing required keys."""
    missing = [fault for fault in error.faults if key_of(fault) == "config.value.not_set"]
    assert {fault.partition(" ")[0] for fault in missing} <= NOT_GIVEN
    return [fault for fault in error.faults if fault not in missing]


def keys_by_setting(faults: list[str]) -> dict[str, str]:
    """Return the key of each fault by the setting or override at its beginning."""
    by_setting = {}
    for fault in faults:
        setting = fault.partition(" ")[0].partition("=")[0]
        assert setting not in by_setting, "once each"
        by_setting[setting] = key_of(fault)
    return by_setting


def test_faults_of_five_kinds_are_one_message():
    """An unknown key, a wrong type, a value out of range, a missing key, two that conflict.

    The sixth is an argument that is not an override.
    """
    expected = {
        "model.sed=3": "config.key.unknown",
        "trainer.devices=two": "config.value.wrong_type",
        "model.optim.lr=-1": "config.value.out_of_range",
        "model.tensor_model_parallel_size=3": "config.parallel_sizes.not_a_divisor_of_ranks",
        "model.seed=[1": "config.override.not_readable",
    }
    with pytest.raises(ConfigError) as raised:
        compose_or_explain("train_reinforce_actor", list(expected))
    by_setting = {override.partition("=")[0]: key for override, key in expected.items()}
    not_given = dict.fromkeys(NOT_GIVEN, "config.value.not_set")
    assert keys_by_setting(raised.value.faults) == by_setting | not_given


def test_values_are_judged_in_the_same_round_as_keys():
    expected = {
        "trainer.devces=2": "config.key.unknown",
        "model.optim.name=distributed_fused_adam": "config.value.not_a_choice",
        "model.peft.peft_scheme=none": "config.value.not_a_choice",
        "trainer.precision=16": "config.value.not_a_choice",
        "+model.precision=16": "config.key.renamed",
    }
    with pytest.raises(ConfigError) as raised:
        compose_or_explain("train_reinforce_actor", list(expected))
    by_setting = {word.lstrip("+").partition("=")[0]: key for word, key in expected.items()}
    assert keys_by_setting(given_ones(raised.value)) == by_setting


def test_all_unknown_keys_are_reported_together():
    """Hydra alone stops at the first one, and accepts keys with a plus."""
    plain = [
        "trainer.devces=2",
        "model.optin.lr=1",
        "trainer.reinforce.trt_llm.enable=True",
        "trainer.devces=3",
    ]
    with pytest.raises(ConfigError) as raised:
        compose_or_explain("train_reinforce_actor", ["model.seed=3", *plain, "+model.precision=16"])
    expected = {
        "trainer.devces": "config.key.unknown",
        "model.optin.lr": "config.key.unknown",
        "trainer.reinforce.trt_llm.enable": "config.key.renamed",
        "model.precision": "config.key.renamed",
    }
    by_setting = keys_by_setting(given_ones(raised.value))
    assert list(by_setting.items()) == list(expected.items()), "in the order of the overrides"
    check_fault(raised.value.faults[1:2], "config.key.unknown", "model.optim.lr")
    with_plus = [f"++{override}" for override in plain]
    faults = read_config(compose(*with_plus, "model.optim.lr=-1"))[1]
    of_given = [fault for fault in faults if key_of(fault) != "config.value.not_set"]
    assert keys_by_setting(of_given) == {
        "model.optim.lr": "config.value.out_of_range",
        "model.optin": "config.key.unknown",
        "trainer.devces": "config.key.unknown",
        "trainer.reinforce.trt_llm.enable": "config.key.renamed",
    }


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        (
            "algorithm=gpro",
            "config.group.not_a_choice",
            ["algorithm", "'gpro'", "dr_grpo, grpo, nemo_aligner"],
        ),
        ("trainer.devices=[2", "config.override.not_readable", ["trainer.devices=[2", "KEY=VALUE"]),
        (
            "learning_rate=1",
            "config.key.unknown",
            ["learning_rate", "reinforce-rl train --help learning"],
        ),
        (
            "model.optim.sched.name=a, b",
            "config.override.bare_comma",
            ["model.optim.sched.name='[a, b]'", "model.optim.sched.name=\"'a, b'\""],
        ),
        ("+trainer.devices=3", "config.hydra.refused", ["'trainer.devices'"]),
        ("trainer.devces=2", "config.key.unknown", ["trainer.devces", "trainer.devices"]),
    ],
)
def test_other_errors_of_hydra_are_reported_in_place(override, key, values):
    with pytest.raises(ConfigError) as raised:
        compose_or_explain("train_reinforce_actor", [override])
    (fault,) = given_ones(raised.value)
    check_fault([fault], key, *values)
    assert "search path" not in fault
    assert "Error parsing" not in fault
