"""The masked-transformer interaction against its formula, and what each mask lets through."""

from itertools import pairwise
from math import sqrt

import pytest
import torch

from recsys import DLRM
from recsys.embeddings import HotColdEmbeddingBagCollection
from recsys.models import MaskedTransformerArch
from tests.models import formulas

NUM_TOKENS, NUM_HEADS, KEPT = 4, 2, 2
MASKS = ("none", "causal", "learned")


def make_arch(mask="learned", **options):
    sizes = {"num_layers": 2, "num_heads": NUM_HEADS, "feedforward": 3, "kept": KEPT}
    return MaskedTransformerArch(NUM_TOKENS - 1, 4, mask=mask, **(sizes | options))


def make_vectors(batch_size=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(batch_size, NUM_TOKENS, 4, generator=generator, dtype=dtype)
    return vectors[:, 0], vectors[:, 1:]


def attended(mask, scores, query):
    """The tokens that a token attends to in a head with these scores, (T, T)."""
    if mask == "causal":
        return list(range(query + 1))
    tokens = list(range(NUM_TOKENS))
    if mask == "learned":
        tokens.sort(key=lambda key: scores[query, key].item(), reverse=True)
        return tokens[:KEPT]
    return tokens


def linear(weights, name, vector):
    return weights[f"{name}.weight"] @ vector + weights[f"{name}.bias"]


def normalized(weights, name, vector):
    centred = vector - vector.mean()
    scaled = centred / (centred.square().mean() + 1e-5).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(weights, name, tokens, mask):
    queries, keys, values = zip(
        *(linear(weights, f"{name}.queries_keys_values", token).chunk(3) for token in tokens),
        strict=True,
    )
    mixed = []
    for query in range(NUM_TOKENS):
        of_heads = []
        for head, (begin, end) in enumerate(pairwise(range(0, 5, 2))):
            scores = weights[f"{name}.scores"][head] if mask == "learned" else None
            chosen = attended(mask, scores, query)
            logits = torch.stack(
                [queries[query][begin:end] @ keys[key][begin:end] / sqrt(2) for key in chosen]
            )
            if mask == "learned":  # a number that is 0 and has a gradient
                logits = logits + scores[query, chosen] - scores[query, chosen].detach()
            shares = logits.exp() / logits.exp().sum()
            of_head = torch.stack([values[key][begin:end] for key in chosen])
            of_heads.append(shares @ of_head)
        mixed.append(linear(weights, f"{name}.attention_out", torch.cat(of_heads)))
    return mixed


def block(weights, name, tokens, mask):
    normal = [normalized(weights, f"{name}.attention_norm", token) for token in tokens]
    mixed = attention(weights, name, normal, mask)
    tokens = [token + each for token, each in zip(tokens, mixed, strict=True)]
    result = []
    for token in tokens:
        normal = normalized(weights, f"{name}.mlp_norm", token)
        hidden = linear(weights, f"{name}.mlp.0", normal).clamp(min=0)
        result.append(token + linear(weights, f"{name}.mlp.2", hidden))
    return result


@pytest.mark.parametrize("bags", ["bags", "one-hot"])
@pytest.mark.parametrize("mask", MASKS)
def test_logits_and_gradients_are_the_formulas(mask, bags):
    tables = HotColdEmbeddingBagCollection(formulas.make_tables())
    model = DLRM(tables, 5, [8, 4], [16, 8, 1], interaction=make_arch(mask)).double()
    formulas.draw_parameters(model)

    batch = formulas.make_batch(bags)

    def formula(weights, sample):
        vectors = formulas.vectors_of(weights, batch, sample)
        for layer in range(2):
            vectors = block(weights, f"inter_arch.blocks.{layer}", vectors, mask)
        products = torch.stack(formulas.products_of_pairs(vectors))
        return formulas.over_arch(weights, torch.cat([vectors[0], products]))

    formulas.require_formula(model, batch, formula)


@pytest.mark.parametrize("mask", MASKS)
def test_autocast_gives_a_close_result_and_gradients_in_float32(mask):
    torch.manual_seed(0)
    arch = make_arch(mask)
    dense, sparse = make_vectors(dtype=torch.float32)
    expected = arch(dense, sparse)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = arch(dense.bfloat16(), sparse)  # as the bottom MLP gives it
    found.float().sum().backward()

    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
    assert {value.grad.dtype for value in arch.parameters()} == {torch.float32}


@pytest.mark.parametrize("mask", MASKS)
def test_a_compiler_sees_the_whole_of_it(mask):
    torch.manual_seed(0)
    arch = make_arch(mask).double()

    compiled = torch.compile(arch, backend="eager", fullgraph=True)

    torch.testing.assert_close(compiled(*make_vectors()), arch(*make_vectors()))
