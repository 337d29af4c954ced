"""Schema of `model`: parallelism, batches, LoRA, rollouts, optimizer and data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from reinforce_rl.config.base import (
    NOT_SET,
    Count,
    Fields,
    Natural,
    NonNegative,
    Positive,
    Section,
    Text,
    key,
)
from reinforce_rl.config.template import TemplateConfig
from reinforce_rl.errors import Fault

LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all"
]


class SamplingConfig(Section):
    use_greedy: bool = key(
        False,
        "take the likeliest token",
        details="; refused in training: all samples would be alike",
    )
    temperature: Positive = key(
        1.0,
        "applies to the log-probs of actor and reference too",
        expected="a finite number above 0 (use_greedy=true takes the likeliest)",
    )
    top_k: Natural = key(
        0,
        "sample from the k likeliest tokens only; 0 for all",
        "tokens",
        expected="at least 0 (0 for all tokens)",
    )
    top_p: float = key(
        1.0, "sample from the likeliest tokens that reach this probability only", gt=0, le=1
    )
    repetition_penalty: Positive = key(
        1.0,
        "1 for none; counts the prompt's tokens too",
        expected="a finite number above 0 (1 for none)",
    )
    end_strings: list[Text] = key([], "a response also ends where its text contains one of these")


class LengthConfig(Section):
    max_length: Count = key(128, "longest response, its end token included", "tokens")
    min_length: Natural = key(
        0,
        "tokens before an end token may come; above 0 biases the gradient, as top_k does",
        "tokens",
        details=": the end token is banned there, and the log-probs do not know of the ban",
    )


class RolloutConfig(Section):
    num_rollout_samples: Count = key(8, "prompts of a step, over all ranks", "prompts")
    rollout_micro_batch_size: Count = key(
        8, "prompts generated together, each with all its samples", "prompts"
    )
    forward_micro_batch_size: Count = key(
        4, "of a log-prob pass", "sequences", follows="model.micro_batch_size"
    )
    val_rollout_micro_batch_size: Count = key(
        32, "prompts generated together in validation", "prompts"
    )
    generation_cache_tokens: int | None = key(
        None,
        "capacity of the native engine's KV cache on a rank; further sequences wait. At least "
        "encoder_seq_length; null: no bound",
        "tokens",
        details=", all sequences of a call at once. Results do not change",
    )
    lean_decoding: bool = key(
        True,
        "native engine: decode without megatron's bookkeeping, on a CPU from packed weights",
        details=(
            ", which take the weights' memory once more during generation. False: megatron's own "
            "layers. Results change by rounding only"
        ),
    )
    static_decoding: bool | None = key(
        None,
        "native engine: decode steps of a static shape; needs `lean_decoding`; null: on a GPU in "
        "bf16",
        details=(
            ", where no sliding window binds. They read the cache by flash attention and check "
            "every eighth step which responses have ended; pipeline stages decode at the same "
            "time. On other devices it is ignored"
        ),
    )
    cuda_graphs: bool | None = key(
        None,
        "replay these steps as CUDA graphs, one for each number of rows; null: with one pipeline "
        "stage",
        details=". Needs `static_decoding` and no pipeline stages",
    )
    num_val_samples: Count | None = key(
        None, "validate on the first prompts of the set only; null for all", "prompts"
    )
    offload_adam_states: bool = key(
        False,
        "on a GPU: Adam's moments and fp32 weights in host memory, gradients freed, during "
        "generation",
    )
    overlap_offload: bool = key(
        False,
        "with `offload_adam_states`: copy them back while log-probs are computed",
        details=", on a separate stream; not yet measured on a GPU",
    )
    sampling_params: SamplingConfig = SamplingConfig()
    allow_biased_sampling: bool = key(
        False,
        "permit top_k, top_p, a repetition penalty or min_length in training; the samples are "
        "then not the policy's, and the gradient is biased",
    )
    val_sampling_params: SamplingConfig = key(
        SamplingConfig(use_greedy=True),
        "of validation",
        follows={"end_strings": "model.reinforce.sampling_params.end_strings"},
    )
    length_params: LengthConfig = LengthConfig()
    skip_special_tokens: bool = key(
        True,
        "remove the tokenizer's special tokens from the response texts in rewards and records",
        details=(
            "; false where a reward looks for one, such as a `<think>` that was added as a "
            "special token. The token that ends a response is never in the text of a reward"
        ),
    )


class ScheduleConfig(Section):
    name: Literal["constant", "linear", "CosineAnnealing"] = key(
        "constant", "constant, linear or CosineAnnealing; the last two end at `min_lr`"
    )
    warmup_steps: Natural = key(0, "linear from 0 to `lr`", "optimizer steps")
    constant_steps: Natural = key(
        0, "at `min_lr` at the end (linear, CosineAnnealing)", "optimizer steps"
    )
    min_lr: NonNegative = key(0.0, "where linear and CosineAnnealing end")


class OptimConfig(Section):
    name: Literal["adam"] = key("adam", "with decoupled weight decay on matrices")
    lr: Positive = key(1e-6, "learning rate after the warm-up")
    weight_decay: NonNegative = key(0.01)
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = key([0.9, 0.98], expected="two numbers, each at least 0 and below 1")
    eps: Positive = key(1e-8)
    fused: bool = key(
        True,
        "torch's fused Adam, which goes over memory once",
        details=(
            "; false: its plain one, which on a GPU takes 4 bytes a parameter more. Where "
            "Transformer Engine or Apex is installed, megatron takes theirs"
        ),
    )
    distributed: bool | None = key(
        None,
        "ranks share Adam's moments and fp32 weights (ZeRO stage 1); null: on GPUs with several "
        "data- or context-parallel ranks",
    )
    overlap_grad_sync: bool | None = key(
        None, "sum gradients over ranks during the last backward pass; null: as for `distributed`"
    )
    in_place_gradients: bool = key(
        True,
        "on a CPU in fp32: accumulate gradients in megatron's gradient buffers in place",
        details=(
            ". False: each gradient is made anew in every micro-batch and added afterwards. "
            "Results change by rounding only"
        ),
    )
    sched: ScheduleConfig = ScheduleConfig()

    def faults(self) -> Iterator[Fault]:
        lr = self.lr
        min_lr = self.sched.min_lr
        if min_lr > lr > 0:
            yield Fault(
                f"model.optim.sched.min_lr is {min_lr}, above model.optim.lr, which is {lr}",
                key="config.min_lr.above_lr",
            )


class DataPrefixConfig(Section):
    train: Text | list[float | str] = key(
        NOT_SET,
        "prompts: a file, a folder, hf:OWNER/NAME, or a list of them",
        kind="path or list",
        details=(
            "; see [data.md](data.md). `[a, b]`: every prompt once an epoch; `[0.3, a, 0.7, b]`: "
            "[blended by weight](#blending-files-by-weight)"
        ),
    )
    validation: Text | list[Text] | dict[str, Text | list[Text]] | None = key(
        None,
        "as train, without weights; {NAME: path or list, ...} for several sets; null for no "
        "validation",
        kind="path, list or sets",
        details=". See [evaluation.md](evaluation.md#validation-sets-with-names)",
    )
    test: Text | list[Text] | None = key(
        None,
        "prompts for one evaluation after the last step",
        kind="path or list",
        details=", with validation's sampling: `test/...` metrics, samples in `test/`",
    )


class FieldsConfig(Section):
    prompt: Text | None = key(
        None,
        "column of the prompts, texts or lists of messages; null: prompt, text, messages or "
        "conversations",
    )
    system: Text | None = key(None, "column of system messages, put before the prompts")
    rename: Fields = key(
        {},
        "names for other columns, as a reward function sees them: "
        "+model.data.fields.rename.NAME=COLUMN",
        details=". A dotted column leads into objects, for instance `reward_model.ground_truth`",
    )

    @property
    def columns(self) -> dict[str, str]:
        """Return the column of each name that is given one."""
        columns = {"prompt": self.prompt, "system": self.system}
        return {
            **self.rename,
            **{name: column for name, column in columns.items() if column is not None},
        }

    def faults(self) -> Iterator[Fault]:
        for name, column in self.rename.items():
            if not isinstance(column, str) or name in ("prompt", "system"):
                yield Fault(
                    f"model.data.fields.rename.{name} is {column!r}; expected the name of a "
                    "column, and a new name other than prompt or system",
                    key="config.rename.no_column",
                )


class DataConfig(TemplateConfig):
    data_prefix: DataPrefixConfig = DataPrefixConfig()
    fields: FieldsConfig = FieldsConfig()
    system_prompt: Text | None = key(None, "system message for conversations that have none")
    apply_chat_template: bool = key(
        False,
        "wrap a plain prompt as one user message of the chat template",
        details=". `messages` always go through the template",
    )
    add_bos: bool | None = key(
        None,
        "put the begin-of-sequence token before a prompt that no template rendered; null: where "
        "the tokenizer does so",
        details=" by itself, `tokenizer(text)`. There is never a second one",
    )
    too_long: Literal["refuse", "skip"] = key(
        "refuse",
        "a prompt above encoder_seq_length - max_length (or environment.max_episode_tokens): "
        "refuse, or skip with a count",
        details=". None is ever cut",
    )
    shuffle: bool = key(True, "a new order each epoch, from seed and epoch")


class LoraTuningConfig(Section):
    adapter_dim: Count = key(32, "rank of an update")
    alpha: Positive = key(32.0, "updates are scaled by alpha / adapter_dim")
    target_modules: Annotated[list[LoraTarget], Field(min_length=1)] = key(
        ["all"],
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or all of them",
        expected="some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, all",
    )


class PeftConfig(Section):
    peft_scheme: Literal["lora"] | None = key(
        None,
        "lora: train low-rank updates of frozen weights; null: train all weights",
        details=". See [architecture.md](architecture.md#lora)",
    )
    lora_tuning: LoraTuningConfig = LoraTuningConfig()


class ParallelConfig(Section):
    """Model parallelism and recomputation, of the actor and of a reward model that is trained."""

    tensor_model_parallel_size: Count = key(
        1,
        "ranks that share each weight matrix",
        "ranks",
        heading="Ranks = tensor x pipeline x context x data; see docs/parallelism.md for what to "
        "choose.",
        details="; see [parallelism.md](parallelism.md)",
    )
    pipeline_model_parallel_size: Count = key(1, "stages that share the layers", "ranks")
    context_parallel_size: Count = key(
        1,
        "ranks that share each sequence in log-prob passes and updates",
        "ranks",
        details="; when generating, they share the prompts",
    )
    sequence_parallel: bool = key(
        False, "tensor-parallel ranks share positions where they share no matrix"
    )
    activations_checkpoint_granularity: Literal["selective", "full"] | None = key(
        None, "recompute in the backward pass: selective (attention), full (layers); null: nothing"
    )
    activations_checkpoint_method: Literal["uniform", "block"] | None = key(
        None, "of full: uniform (all layers) or block (the first num_layers of each stage)"
    )
    activations_checkpoint_num_layers: Count | None = key(
        None,
        "of full: layers between two kept inputs (uniform), or recomputed layers (block)",
        "layers",
    )
    megatron_overrides: Fields = key(
        {},
        "of megatron-core's TransformerConfig: +model.megatron_overrides.NAME=VALUE",
        details="; plain values only",
    )

    @property
    def block_size(self) -> int:
        """Ranks that share one model copy and work on the same prompts."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )


class ModelConfig(ParallelConfig):
    seed: Natural = key(1234, "of sampling and of the prompts' order")
    transformer_engine: bool = key(
        False,
        "use Transformer Engine's layers; on GPUs, where it is installed",
        details=" ([details](gpu.md#transformer-engine)). Off until it has run on one",
    )
    encoder_seq_length: int = key(2048, "longest sequence, prompt and response together", "tokens")
    micro_batch_size: Count = key(4, "sequences in one forward and backward pass", "sequences")
    tokens_per_micro_batch: int | None = key(
        None,
        "tokens in a pass, padding included, instead of `micro_batch_size` and "
        "`forward_micro_batch_size`; at least `encoder_seq_length`",
        "tokens",
    )
    logits_chunk_tokens: Count | None = key(
        None,
        "response tokens whose logits exist at a time; null: 1024, on a CPU 128",
        "tokens",
        details=", where larger chunks are slower than its allocator's cache",
    )
    shared_prefix: bool | None = key(
        None,
        "log-prob passes and updates read a group's prompt once, without padding; null: on a CPU, "
        "where possible",
        details=(
            ". Results change by rounding only. Needs `context_parallel_size=1` and no "
            "`rollout_batch_seq_length`. See [performance.md](performance.md#shared-prefix)"
        ),
    )
    global_batch_size: int | None = key(
        None,
        "sequences of an optimizer step; null: all num_rollout_samples x num_rollouts_per_prompt",
        "sequences",
    )
    reference_placement: Literal["host", "device"] = key(
        "host",
        "where the reference's weights are: host (transferred for each pass) or device (no "
        "transfer)",
        details=". With LoRA there is no copy",
    )
    peft: PeftConfig = PeftConfig()
    reinforce: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    data: DataConfig = DataConfig()

    def chunk_tokens(self, *, gpu: bool) -> int:
        """`logits_chunk_tokens`, resolved."""
        if self.logits_chunk_tokens is not None:
            return self.logits_chunk_tokens
        # glibc gives blocks above 32 MiB back at once, and fresh ones have to be cleared page by
        # page.
        return 1024 if gpu else 128

    def shares_prefix(self, *, gpu: bool, is_padded: bool) -> bool:
        """`shared_prefix`, resolved; `is_padded` if every row has a fixed length."""
        if self.shared_prefix is not None:
            return self.shared_prefix
        # On a GPU two equal runs with shared prompts were seen to differ: atomics sum the gradients
        # of prompts.
        return not gpu and self.context_parallel_size == 1 and not is_padded
