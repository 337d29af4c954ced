"""Log-probs and entropies against log_softmax of whole logits.

They do not depend on padding, batching, chunking or sharding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import (
    brute_force_scores,
    hf_gradients,
    megatron_model,
    named_gradients,
    padded_sequences,
    response_log_probs,
    transformers_model,
)
from helpers.ranks import call_on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.log_probs import chunked_log_probs
from reinforce_rl.megatron.model.model import VocabShard

PROMPT_LENGTHS = [5, 1, 9, 3]
RESPONSE_LENGTHS = [4, 7, 1, 0]

CHUNK = 5  # smaller than the 12 response tokens
# three padded rows of the weight
POSITIONS = 7
TOKENS = 13
ROWS = 16
LOG_PROBS = (1.0, 0.0)
ENTROPY = (0.0, 1.0)
BOTH = (1.0, -0.3)


def head_inputs(
    positions: int, tokens: int, rows: int, hidden_size: int = 5, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden [n, h], weight [rows, h] and targets [n] below `tokens`.

    They are float64, with gradients. `scale` is about the standard deviation of the logits. Padded
    rows of the weight are non-zero, so that their use would show.
    """
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.float64, "generator": generator}
    hidden = torch.randn(positions, hidden_size, **options) * scale / hidden_size**0.5
    weight = torch.randn(rows, hidden_size, **options)
    targets = torch.randint(0, tokens, (positions,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def full_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies, both [n]."""
    table = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)


def scores_and_gradients(folder: str | Path, mesh: Mesh) -> dict[str, Tensor]:
    """Return `log_probs` and `entropy` [4, 7] and the gradient; a collective call.

    Gradients are float64 and have Hugging Face names.
    """
    lm = megatron_model(folder, mesh, torch.float64)
    batch = padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, lm.architecture.vocab_size)
    scores = response_log_probs(
        lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=5, with_entropy=True
    )
    assert scores.entropy is not None
    for_log_probs, for_entropy = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    (for_log_probs * scores.log_probs + for_entropy * scores.entropy).sum().backward()
    gradients = mesh.from_model_parallel_rank_0(hf_gradients(lm))
    return {
        "log_probs": scores.log_probs.detach(),
        "entropy": scores.entropy.detach(),
        **gradients,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), vocab_size=63, tied=False)


@pytest.fixture(scope="module")
def lm(folder, mesh):
    return megatron_model(folder, mesh)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers_model(folder)


@pytest.fixture
def batch():
    return padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, vocab_size=63)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_equal_to_log_softmax_of_transformers(temperature, lm, theirs, batch):
    with torch.no_grad():
        scores = response_log_probs(
            lm, lm, *batch, temperature=temperature, width=8, chunk_tokens=CHUNK, with_entropy=True
        )
        log_probs, entropies = brute_force_scores(theirs, *batch, temperature=temperature, width=8)
    assert scores.entropy is not None
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropies, atol=1e-5, rtol=0)
    for row, length in enumerate(RESPONSE_LENGTHS):
        assert (scores.log_probs[row, :length] < 0).all()
        assert (scores.entropy[row, :length] > 0).all()
        assert (scores.log_probs[row, length:] == 0).all()
        assert (scores.entropy[row, length:] == 0).all()


def test_entropy_only_where_it_is_asked_for(lm, batch):
    assert (
        response_log_probs(lm, lm, *batch, temperature=1.0, width=7, chunk_tokens=CHUNK).entropy
        is None
    )


def test_temperature_changes_them(lm, batch):
    at_1 = log_probs_of(lm, *batch, temperature=1.0).detach()
    at_0_7 = log_probs_of(lm, *batch, temperature=0.7).detach()
    assert (at_1 - at_0_7).abs().max() > 0.1


def test_independent_of_padding_and_of_the_rest_of_the_batch(lm, batch):
    sequences, prompts, responses = batch
    with torch.no_grad():
        together = log_probs_of(lm, *batch)
        wider = torch.nn.functional.pad(sequences, (0, 6), value=17)
        # Positions behind the end of a sequence are never read.
        for row in range(len(sequences)):
            wider[row, prompts[row] + responses[row] :] = 17
        torch.testing.assert_close(
            log_probs_of(lm, wider, prompts, responses), together, atol=2e-6, rtol=0
        )
        for row in range(len(sequences)):
            single_row = slice(row, row + 1)
            alone = log_probs_of(
                lm, sequences[single_row], prompts[single_row], responses[single_row]
            )
            torch.testing.assert_close(alone[0], together[row], atol=2e-6, rtol=0)


def test_gradient_equals_plain_torch(lm, theirs, batch):

    for_log_probs, for_entropy = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    lm.zero_grad()
    scores = response_log_probs(
        lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=CHUNK, with_entropy=True
    )
    assert scores.entropy is not None
    (for_log_probs * scores.log_probs + for_entropy * scores.entropy).sum().backward()
    theirs.zero_grad()
    log_probs, entropies = brute_force_scores(theirs, *batch, temperature=0.7, width=7)
    (for_log_probs * log_probs + for_entropy * entropies).sum().backward()
    expected = named_gradients(theirs)
    gradients = hf_gradients(lm)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=name)


def test_nothing_but_empty_responses_keeps_the_graph(lm):
    sequences = torch.full((2, 3), 5)
    prompts = torch.tensor([3, 2])
    scores = response_log_probs(
        lm,
        lm,
        sequences,
        prompts,
        torch.zeros(2).long(),
        temperature=1.0,
        width=4,
        chunk_tokens=2,
        with_entropy=True,
    )
    assert scores.entropy is not None
    for out in (scores.log_probs, scores.entropy):
        assert torch.equal(out, torch.zeros(2, 4))
        lm.zero_grad()
        out.sum().backward(retain_graph=True)
        for p in lm.parameters():
            if p.grad is not None:
                assert (p.grad == 0).all()
        assert any(p.grad is not None for p in lm.parameters())


def test_single_token_prompt_without_response(lm):
    ones = torch.ones(1).long()
    scores = response_log_probs(
        lm, lm, ones[:, None], ones, ones - 1, temperature=1.0, width=0, chunk_tokens=1
    )
    assert scores.log_probs.shape == (1, 0)


def test_bfloat16_model_gives_float32_softmax(folder, mesh, batch):
    """Logits have the model's precision, log-probs have float32.

    A bfloat16 log-prob would be off by 1e-2.
    """
    lm = megatron_model(folder, mesh, torch.bfloat16)
    with torch.no_grad():
        scores = response_log_probs(
            lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=CHUNK, with_entropy=True
        )
        sequences, prompts, responses = batch
        hidden = lm(sequences[:, :-1]).flatten(0, 1)
        table = torch.log_softmax(lm.logits(hidden) / 0.7, dim=-1)
    table = table.view(*sequences[:, :-1].shape, -1)
    assert scores.entropy is not None
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    for row in range(len(sequences)):
        for t in range(int(responses[row])):
            at = int(prompts[row]) + t
            expected = table[row, at - 1]
            torch.testing.assert_close(
                scores.log_probs[row, t], expected[sequences[row, at]], atol=1e-5, rtol=0
            )
            entropy = torch.special.entr(expected.exp()).sum()
            torch.testing.assert_close(scores.entropy[row, t], entropy, atol=1e-5, rtol=0)


def scores_of_two_ranks(folders, vocabularies):
    """Return scores and gradients of each model, and the results of a sharded output head.

    The latter are (log-probs, entropies, gradient of hidden, gradient of the whole weight).
    """
    with parallel_mesh(2) as mesh:
        models = [scores_and_gradients(folder, mesh) for folder in folders]
        return models, {tokens: sharded_head(tokens, mesh) for tokens in vocabularies}


def sharded_head(tokens, mesh):
    hidden, weight, targets = head_inputs(7, tokens, 16, scale=30.0)
    mine = weight.detach().chunk(2)[mesh.tp_rank].clone().requires_grad_()
    start = 8 * mesh.tp_rank
    shard = VocabShard(start, min(tokens - start, 8), mesh.tp_group)
    log_probs, entropy = scores_of((hidden, mine, targets), shard, 0.6)
    gradients = torch.autograd.grad(log_probs.sum() - 0.3 * entropy.sum(), (hidden, mine))
    parts = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(parts, gradients[1], group=mesh.tp_group)
    return log_probs.detach(), entropy.detach(), gradients[0], torch.cat(parts).detach()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return results of two tensor-parallel ranks; the models' vocabularies need padding."""
    root = tmp_path_factory.mktemp("two_ranks")
    folders = [
        tiny_llama_folder(root / "untied", vocab_size=63, tied=False),
        tiny_llama_folder(root / "odd_groups", vocab_size=61, heads=9, groups=3, hidden=36),
    ]
    models, heads = call_on_ranks(scores_of_two_ranks, 2, folders, (16, 13, 8))[0]
    return list(zip(folders, models, strict=True)), heads


def test_two_tensor_parallel_ranks(two_ranks, mesh):
    """In float64: a padded column would take probability from the others."""
    for folder, results in two_ranks[0]:
        model = transformers_model(folder)
        batch = padded_sequences(
            PROMPT_LENGTHS, RESPONSE_LENGTHS, vocab_size=model.config.vocab_size
        )
        with torch.no_grad():
            expected = brute_force_scores(model, *batch, temperature=0.7, width=7)[0]
        torch.testing.assert_close(results["log_probs"].float(), expected, atol=1e-5, rtol=0)
        alone = scores_and_gradients(folder, mesh)
        assert set(results) == set(alone)
        for name, tensor in alone.items():
            torch.testing.assert_close(results[name], tensor, atol=1e-10, rtol=1e-10, msg=name)


def log_probs_of(lm, sequences, prompt_lengths, response_lengths, temperature=0.7):
    return response_log_probs(
        lm,
        lm,
        sequences,
        prompt_lengths,
        response_lengths,
        temperature=temperature,
        width=7,
        chunk_tokens=CHUNK,
    ).log_probs


@pytest.fixture(scope="module")
def shard(mesh):
    return VocabShard(0, TOKENS, mesh.tp_group)


@pytest.fixture
def inputs():
    return head_inputs(POSITIONS, TOKENS, ROWS)


@pytest.mark.parametrize("chunk_tokens", [1, 3, POSITIONS, POSITIONS + 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("loss", [LOG_PROBS, ENTROPY, BOTH], ids=["log_probs", "entropy", "both"])
def test_values_and_gradients_equal_whole_logits(loss, temperature, chunk_tokens, shard, inputs):
    hidden, weight, targets = inputs
    weights = torch.randn(
        2, POSITIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )

    def gradients(outputs):
        terms = [
            factor * (w * out).sum()
            for factor, w, out in zip(loss, weights, outputs, strict=True)
            if factor
        ]
        return torch.autograd.grad(torch.stack(terms).sum(), (hidden, weight))

    scores = scores_of(inputs, shard, temperature, chunk_tokens)
    expected = full_log_probs(hidden, weight[:TOKENS], targets, temperature)
    torch.testing.assert_close(scores, expected, atol=1e-13, rtol=1e-13)
    for gradient, other in zip(gradients(scores), gradients(expected), strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy, shard, inputs):
    hidden, weight, targets = inputs

    def outputs(hidden, weight) -> tuple[torch.Tensor, ...]:
        outputs_or_none = chunked_log_probs(
            hidden,
            weight,
            targets,
            shard,
            temperature=0.6,
            chunk_tokens=3,
            with_entropy=with_entropy,
        )
        return tuple(out for out in outputs_or_none if out is not None)

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_without_entropy_the_log_probs_are_the_same(shard, inputs):
    hidden, weight, targets = inputs
    log_probs, entropy = chunked_log_probs(
        hidden, weight, targets, shard, temperature=0.6, chunk_tokens=3, with_entropy=False
    )
    assert entropy is None
    assert torch.equal(log_probs, scores_of(inputs, shard, 0.6)[0])


def test_padded_rows_have_no_gradient(shard, inputs):
    log_probs, entropy = scores_of(inputs, shard, 1.0)
    (gradient,) = torch.autograd.grad((log_probs + entropy).sum(), inputs[1])
    assert (gradient[TOKENS:] == 0).all()
    assert (gradient[:TOKENS] != 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e4], ids=["uniform", "one token has all"])
def test_extreme_logits_stay_finite(scale, shard, inputs):
    hidden, weight, targets = (t.detach() for t in inputs)
    hidden = (scale * hidden).float().requires_grad_()
    weight = weight.float().requires_grad_()
    log_probs, entropy = scores_of((hidden, weight, targets), shard, 1.0)
    expected = full_log_probs(hidden.double(), weight[:TOKENS].double(), targets, 1.0)
    torch.testing.assert_close(log_probs.double(), expected[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-5, rtol=0)
    gradients = torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))
    for gradient in gradients:
        assert gradient.isfinite().all()


def test_only_one_input_needs_a_gradient(shard, inputs):
    hidden, weight, targets = inputs
    options = {"temperature": 1.0, "chunk_tokens": 3, "with_entropy": False}
    both = torch.autograd.grad(
        chunked_log_probs(hidden, weight, targets, shard, **options)[0].sum(), (hidden, weight)
    )
    frozen = chunked_log_probs(hidden, weight.detach(), targets, shard, **options)[0].sum()
    assert torch.equal(torch.autograd.grad(frozen, hidden)[0], both[0])
    frozen = chunked_log_probs(hidden.detach(), weight, targets, shard, **options)[0].sum()
    assert torch.equal(torch.autograd.grad(frozen, weight)[0], both[1])


def test_no_position_at_all(shard, inputs):
    hidden, weight, targets = inputs
    outputs = scores_of((hidden[:0], weight, targets[:0]), shard, 1.0)
    assert [out.shape for out in outputs] == [(0,), (0,)]
    assert not torch.autograd.grad(outputs[0].sum(), weight)[0].any()


class TestBFloat16:
    """Logits always have 8 bits of mantissa; the softmax has float32's 24."""

    @pytest.fixture
    def inputs(self):
        hidden, weight, targets = head_inputs(64, TOKENS, ROWS)
        hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
        return hidden, weight, targets

    def test_float32_softmax_of_the_logits(self, shard, inputs):
        hidden, weight, targets = inputs
        scores = scores_of(inputs, shard, 0.7, chunk_tokens=5)
        table = torch.log_softmax((hidden @ weight[:TOKENS].t()).double() / 0.7, dim=-1)
        log_probs = table.gather(1, targets[:, None])[:, 0]
        entropy = -(table.exp() * table).sum(dim=-1)
        assert {out.dtype for out in scores} == {torch.float32}
        torch.testing.assert_close(
            [out.double() for out in scores], [log_probs, entropy], atol=2e-6, rtol=0
        )

    def test_weight_gradient_is_rounded_once(self, shard, inputs):
        """Summing 64 chunks in bfloat16 would lose values below 1/256 of the sum."""
        hidden, weight, targets = inputs
        exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        exact_log_probs, _ = full_log_probs(exact[0], exact[1][:TOKENS], targets, 0.7)
        expected = torch.autograd.grad(exact_log_probs.sum(), exact)
        log_probs, _ = scores_of(inputs, shard, 0.7, chunk_tokens=1)
        gradients = torch.autograd.grad(log_probs.sum(), (hidden, weight))
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
        for gradient, exactly in zip(gradients, expected, strict=True):
            assert (gradient.double() - exactly).norm() < 5e-3 * exactly.norm()


class TestMemory:
    """Count all created tensors, and all tensors saved for the backward pass."""

    POSITIONS = 40
    TOKENS = 500
    CHUNK = 6

    @pytest.fixture
    def inputs(self):
        return head_inputs(self.POSITIONS, self.TOKENS, self.TOKENS, hidden_size=3)

    @pytest.fixture
    def shard(self, mesh):
        return VocabShard(0, self.TOKENS, mesh.tp_group)

    def run(self, inputs, shard, loss):
        outputs = scores_of(inputs, shard, 0.6, chunk_tokens=self.CHUNK)
        terms = [factor * out.sum() for factor, out in zip(loss, outputs, strict=True) if factor]
        torch.stack(terms).sum().backward()

    @pytest.mark.parametrize(
        "loss", [LOG_PROBS, ENTROPY, BOTH], ids=["log_probs", "entropy", "both"]
    )
    def test_no_tensor_is_larger_than_the_logits_of_a_chunk(self, loss, inputs, shard):
        with LargestTensor() as made:
            self.run(inputs, shard, loss)
        assert made.numel == self.CHUNK * self.TOKENS
        with LargestTensor() as made:
            full_log_probs(inputs[0], inputs[1], inputs[2], 0.6)
        assert made.numel == self.POSITIONS * self.TOKENS

    @pytest.mark.parametrize(
        "loss", [LOG_PROBS, ENTROPY, BOTH], ids=["log_probs", "entropy", "both"]
    )
    def test_nothing_saved_has_a_vocabulary_dimension_but_the_weight(self, loss, inputs, shard):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            self.run(inputs, shard, loss)
        sizes = {
            tuple(tensor.shape) for tensor in saved if tensor.data_ptr() != inputs[1].data_ptr()
        }
        expected = {tuple(inputs[0].shape), (self.POSITIONS,)}
        assert sizes == expected


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that an operation returned, including views of parameters."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return outputs


def test_ranks_without_the_largest_logit_or_without_tokens(two_ranks):
    """Two ranks share batches of 16, 13 and 8 tokens; the second has 8, 5 and none of them."""
    for tokens, results in two_ranks[1].items():
        hidden, weight, targets = head_inputs(POSITIONS, tokens, ROWS, scale=30.0)
        outputs = full_log_probs(hidden, weight[:tokens], targets, 0.6)
        loss = outputs[0].sum() - 0.3 * outputs[1].sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        for result, other in zip(results, (*outputs, *gradients), strict=True):
            torch.testing.assert_close(result, other.detach(), atol=1e-11, rtol=1e-11)


def scores_of(inputs, shard, temperature, chunk_tokens=3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies."""
    hidden, weight, targets = inputs
    log_probs, entropy = chunked_log_probs(
        hidden,
        weight,
        targets,
        shard,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    assert entropy is not None
    return log_probs, entropy
