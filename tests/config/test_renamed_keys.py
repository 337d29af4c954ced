"""Unknown keys: all of them in one message, and NeMo-Aligner's with what stands in their place."""

from __future__ import annotations

import re

import pytest
from helpers.tiny_run import compose
from omegaconf import OmegaConf

from reinforce_rl.config.compose import compose as compose_or_explain
from reinforce_rl.config.load import _ADVICE, read_config, renamed
from reinforce_rl.errors import ConfigError

# Of gpt_reinforce_actor.yaml and inference_rm.yaml in examples/nlp/gpt/conf of NVIDIA/NeMo-Aligner; none of ours.
_TEXT = """
trainer.accelerator trainer.logger trainer.enable_checkpointing trainer.use_distributed_sampler trainer.max_time
trainer.reinforce.trt_llm.enable trainer.reinforce.trt_llm.reshard trainer.reinforce.trt_llm.max_input_len
trainer.reinforce.trt_llm.seed trainer.reinforce.trt_llm.model_type trainer.reinforce.trt_llm.unload_engine_train
trainer.reinforce.batch_iterator.use_flask trainer.reinforce.batch_iterator.port
trainer.reinforce.model_gbs trainer.reinforce.model_mbs
exp_manager.exp_dir exp_manager.resume_from_checkpoint exp_manager.resume_ignore_no_checkpoint
exp_manager.create_checkpoint_callback exp_manager.checkpoint_callback_params.monitor
exp_manager.checkpoint_callback_params.save_top_k exp_manager.checkpoint_callback_params.mode
exp_manager.checkpoint_callback_params.always_save_nemo exp_manager.checkpoint_callback_params.save_nemo_on_train_end
exp_manager.checkpoint_callback_params.filename exp_manager.checkpoint_callback_params.model_parallel_size
model.reinforce.sampling_params.add_BOS model.reinforce.sampling_params.all_probs
model.reinforce.sampling_params.compute_logprob model.reinforce.trt_llm
model.peft.restore_from_path model.peft.restore_from_ckpt.checkpoint_dir model.peft.restore_from_ckpt.checkpoint_name
model.peft.lora_tuning.adapter_dropout model.peft.lora_tuning.column_init_method
model.peft.lora_tuning.row_init_method model.peft.lora_tuning.layer_selection model.peft.lora_tuning.weight_tying
model.peft.lora_tuning.position_embedding_strategy
model.mcore_gpt model.megatron_amp_O2 model.max_position_embeddings model.optim.bucket_cap_mb
model.optim.contiguous_grad_buffer model.precision model.data.data_impl model.data.splits_string model.data.seq_length
model.data.skip_warmup model.data.reset_position_ids model.data.reset_attention_mask
model.data.eod_mask_loss model.data.index_mapping_dir model.overwrite_base_config.data.data_prefix
combine_rm_and_critic_server remote_critic_rm.reward_model.ip trainer.ppo.max_steps model.ppo.num_rollout_samples
rm_model_file model.reward_standardization.enable model.regression.merge_attributes
"""
NEMO_ALIGNER = _TEXT.split()


def dotted(node: object, prefix: str = "") -> set[str]:
    """Keys and groups."""
    if not isinstance(node, dict):
        return {prefix}
    return {prefix} | {key for name, child in node.items() for key in dotted(child, f"{prefix}.{name}".lstrip("."))}


OURS = dotted(OmegaConf.to_container(compose()))
OF_SERVER = dotted(OmegaConf.to_container(compose(name="serve_reward_model")))


def test_every_key_of_nemo_aligner_is_answered_and_none_of_ours():
    assert [key for key in NEMO_ALIGNER if renamed(key) is None] == []
    assert [key for key in OURS | OF_SERVER if renamed(key)] == []
    assert renamed("model.data.shufle") is renamed("trt_llms") is renamed("") is None


def test_the_answers_name_keys_that_there_are():
    named = {key for advice in _ADVICE.values() for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice)}
    assert len(named) > 10
    assert named - OURS - OF_SERVER == set()


def test_unknown_keys_are_told_together_however_they_are_given():
    """Hydra stops at the first, and takes those with a plus."""
    plain = ["trainer.devces=2", "model.optin.lr=1", "trainer.reinforce.trt_llm.enable=True", "trainer.devces=3"]
    with pytest.raises(ConfigError) as raised:
        compose_or_explain("train_reinforce_actor", ["model.seed=3", *plain, "+model.precision=16"])
    assert [fault.split(" is ")[0] for fault in raised.value.faults] == [
        "trainer.devces",
        "model.optin.lr",
        "trainer.reinforce.trt_llm.enable",
    ]
    assert "did you mean model.optim.lr" in raised.value.faults[1]
    with_plus = [f"++{override}" for override in plain]
    faults = [fault for fault in read_config(compose(*with_plus, "model.optim.lr=-1"))[1] if "not set" not in fault]
    assert sorted(fault.split(" is ")[0] for fault in faults) == [
        "model.optim.lr",
        "model.optin",
        "trainer.devces",
        "trainer.reinforce.trt_llm",
    ]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("algorithm=gpro", "algorithm is 'gpro'; expected one of dr_grpo, grpo, nemo_aligner"),
        ("trainer.devices==2", "trainer.devices==2 cannot be read as an override; expected KEY=VALUE"),
        (
            "learning_rate=1",
            "learning_rate is not a key of the configuration; look for it: reinforce-rl train --help learning",
        ),
        ("model.optim.sched.name=a, b", "write a list as model.optim.sched.name='[a, b]', a text as"),
        ("+trainer.devices=3", "An item is already at 'trainer.devices'"),
        ("trainer.devces=2", "did you mean trainer.devices?"),
    ],
)
def test_what_else_hydra_refuses_is_told_in_its_place(override, text):
    with pytest.raises(ConfigError) as raised:
        compose_or_explain("train_reinforce_actor", [override])
    (fault,) = raised.value.faults
    assert text in fault and "search path" not in fault and "Error parsing" not in fault
