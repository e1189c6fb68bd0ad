"""Exact decoding: a node of any tree has the bits of a plain step at its place, in products, attention and texts."""

import logging
from itertools import product

import pytest
import torch

from poss_lightning import prepack
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target_model import by_position
from poss_lightning.target_model.by_position import TAIL, ByPosition, find_tails
from poss_lightning.target_model.cache import TreeCache
from poss_lightning.target_model.model import Target
from tests.support import naive
from tests.support.decoders import drawn, plant, speculate
from tests.support.tiny import tiny_draft, tiny_model, tiny_tokenizer
from tests.support.tolerance import close
from tests.support.trees import random_tree
from tests.test_prepack import OtherOrder

DTYPES = torch.float32, torch.bfloat16
HEADS = (4, 2, 8), (9, 3, 64), (4, 4, 16), (8, 1, 128)  # query heads, key heads, width
LENGTHS = [1, 40], [255, 17], [511, 300], [700, 64]  # of two texts side by side
PATHS = {"depth": 4, "nodes": 12, "tree_width": 3}


def tree_above(seed: int, nodes: int = 30) -> list[list[bool]]:
    return naive.ancestor_mask(random_tree(seed, nodes, vocabulary=300)[1])


def test_the_gathered_tails_are_the_drawing():
    lines = by_position.__doc__.split("slot  ")[1].splitlines()
    slots = [None if name == "|" else name for name in lines[0].split()]
    names = [name for name in slots if name]
    ancestors = torch.tensor([naive.ancestor_mask([0, 0, 0, 1])])
    found = find_tails(ancestors, torch.tensor([6]), tail=4)[0]
    drawn_tails = [line.split("gathers")[1].split() for line in lines[1:]]
    assert [[names[slot] for slot in row] for row in found.tolist()] == drawn_tails


def attend(queries, keys, values, ancestors, lengths, window=None):
    """By position: (B, H, n, d), (B, kv, S, d) twice, (B, n, n), (B,) -> (B, n, H, d)."""
    batch, shared, extent, width = keys.shape
    cpu, sizes = torch.device("cpu"), {"heads": shared, "head_dim": width, "dtype": keys.dtype}
    cache = TreeCache([cpu], cpu, batch, extent, **sizes)
    cache.append(lengths)
    cache.stores[cpu].write(0, torch.arange(batch * extent), keys, values)
    positions = cache.slots.lengths[:, None] + ancestors.sum(-1) - 1
    group = queries.shape[1] // shared
    by_position = ByPosition(keys.dtype, width, group, rows=1)
    mask, attention = by_position.read({"": window}, ancestors, positions, cache, group)
    return attention(0, queries, *cache.stores[cpu].view(0, cache.slots.extent), mask, None)


def inputs(heads, lengths, dtype, nodes=30):
    """Queries, keys and values, and the trees' ancestors; slots beyond a tree hold what an earlier one left."""
    queries, shared, width = heads
    torch.manual_seed(0)
    query = torch.randn(2, nodes, queries, width).to(dtype).transpose(1, 2)
    store = torch.randn(2, 2, 1024, shared, width).to(dtype)
    return query, *store.transpose(2, 3), torch.tensor([tree_above(seed, nodes) for seed in range(2)])


CASES = [(*case, window) for case, window in zip(product(DTYPES, HEADS, LENGTHS), [None, 20] * 16, strict=True)]


@pytest.mark.parametrize(("dtype", "heads", "lengths", "window"), CASES, ids=str)
def test_a_node_attends_as_a_plain_step_bit_for_bit_and_as_defined(dtype, heads, lengths, window):
    queries, keys, values, ancestors = inputs(heads, lengths, dtype)
    found = attend(queries, keys, values, ancestors, lengths, window)
    for row, node in product(range(2), (0, 3, 11, 29)):
        path = ancestors[row, node].nonzero()[:, 0]
        place = lengths[row] + len(path) - 1
        in_order = torch.arange(1024)
        in_order[lengths[row] : place + 1] = lengths[row] + path
        step = [x[row : row + 1, :, in_order] for x in (keys, values)]
        plain = attend(queries[row : row + 1, :, node : node + 1], *step, torch.ones(1, 1, 1) > 0, [place], window)
        assert torch.equal(plain[0, 0], found[row, node])
        seen = slice(max(0, place + 1 - window) if window else 0, place + 1)
        k, v = (x[0, :, seen].double().transpose(0, 1) for x in step)  # (S, kv, d)
        defined = naive.attention(queries[row, :, node].double(), list(k), list(v))
        assert close(found[row, node], defined, len(k), sums=2, of=v.abs().max())


def record_verified(target: Target, patch: pytest.MonkeyPatch) -> dict[tuple[int, ...], torch.Tensor]:
    """Record the draft's input and the logits of every node, by where its tree begins and the path to it."""
    seen, verify = {}, target.verify

    def recording(tokens, ancestors, cache, *rest):
        draft_input, logits = verify(tokens, ancestors, cache, *rest)
        for node, above in enumerate(ancestors[0]):
            place = (cache.slots.host_lengths[0], *tokens[0, above].tolist())
            seen[place] = torch.cat([draft_input[0, node], logits[0, node]])
        return draft_input, logits

    patch.setattr(target, "verify", recording)
    return seen


def of_dtype(dtype, layers=2, **changes) -> Target:
    model = tiny_model(num_hidden_layers=layers, intermediate_size=64, hidden_size=64, **changes).to(dtype)
    return Target(model, tiny_tokenizer(), "tiny", exact=True)


DRAFTS = [
    (2, [2, 2], {}, {}),
    (2, [2, 2], {}, {"lookup": 6}),
    (2, [4], {}, {"tree": "auto", "lookup": 4}),
    (7, [4], {"kind": "block", "block_layers": 2}, {}),
    (7, [4], {"kind": "eagle3", "vocabulary": torch.arange(0, 320, 3), "detach": False}, {"tree_width": 1, "nodes": 5}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7), Sampling(1.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize(("layers", "allocation", "config", "options"), DRAFTS, ids=str)
def test_texts_are_plain_decoding_s_in_any_dtype(dtype, sampling, layers, allocation, config, options):
    target = of_dtype(dtype, layers)
    expected = drawn(Autoregressive(target), sampling, 0, limit=40, stops=frozenset())
    engine = speculate(target, tiny_draft(target, allocation, **config), **PATHS | options)
    plant(engine, expected)
    assert engine.exact and drawn(engine, sampling, 0, limit=36, stops=frozenset()) == [row[:36] for row in expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lookup", [0, 6])
@pytest.mark.parametrize("length", [5, 30, 250], ids=str)
def test_nodes_have_the_features_and_logits_of_plain_steps_bit_for_bit(dtype, lookup, length, monkeypatch):
    """And not where keys are read in the order of the tree's nodes."""
    target, prompts = of_dtype(dtype), [[7] * length]
    truth = drawn(Autoregressive(target), GREEDY, 0, prompts, 60, frozenset())

    def verified(decoder) -> dict[int, torch.Tensor]:
        with monkeypatch.context() as patch:
            seen = record_verified(target, patch)
            decoder.decode(prompts, 50, frozenset())
        return by_text(seen, prompts[0], truth[0])

    def drafted() -> dict[int, torch.Tensor]:
        engine = speculate(target, tiny_draft(target, [4]), **PATHS, lookup=lookup)
        plant(engine, truth, prompts)
        return verified(engine)

    plain, ours = verified(Autoregressive(target)), drafted()
    assert len(ours) > 40 and all(plain[place].equal(found) for place, found in ours.items() if place in plain)
    monkeypatch.setattr(target, "by_position", None)
    plain, ours = verified(Autoregressive(target)), drafted()
    if dtype == torch.float32:  # in bfloat16 the rounding of so short sums hides their order
        assert not all(plain[place].equal(found) for place, found in ours.items() if place in plain)


@pytest.mark.parametrize("few", [2, 16])
def test_steps_of_few_tokens_are_filled_up_where_few_rows_are_summed_in_another_order(few, monkeypatch):
    monkeypatch.setattr(prepack, "_multiply", lambda weight, bias, layout: OtherOrder(weight, bias, few))
    prepack.steadiest.cache_clear()
    target = of_dtype(torch.float32)  # an error if a trial finds other bits
    assert target.steady_rows > few
    prompts = [[7] * 30, [9, 8, 7], [5] * 12][: 3 if few > 2 else 1]
    expected = drawn(Autoregressive(target), Sampling(1.0), 0, prompts, 40, frozenset())
    engine = speculate(target, tiny_draft(target, [4]), **PATHS)
    plant(engine, expected, prompts)
    assert drawn(engine, Sampling(1.0), 0, prompts, 36, frozenset()) == [row[:36] for row in expected]
    prepack.steadiest.cache_clear()


def by_text(seen, prompt, truth) -> dict[int, torch.Tensor]:
    """What was computed at each place of the text, of nodes that follow it."""
    text, found = [*prompt, *truth], {}
    for (length, *path), value in seen.items():
        if text[length : length + len(path)] == path:
            found[length + len(path)] = value
    return found


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "qwen3", "mistral", "llama, yarn"])
def test_families_are_exact_or_say_why_not(name, caplog):
    from tests.target_model.test_families import family

    with caplog.at_level(logging.INFO, logger="poss_lightning"):
        target = family(name, intermediate_size=64)
    said = [record.getMessage() for record in caplog.records if "breaks a tie" in record.getMessage()]
    assert target.exact == (name != "gemma2") and len(said) == (name == "gemma2")
    if target.exact:
        expected = drawn(Autoregressive(target), Sampling(1.0), 0, limit=40, stops=frozenset())
        engine = speculate(target, tiny_draft(target, [3]), 3, 12, 4)
        plant(engine, expected)
        assert drawn(engine, Sampling(1.0), 0, limit=36, stops=frozenset()) == [row[:36] for row in expected]


def test_paths_too_long_for_the_tail_are_said_not_to_be_exact(target, caplog):
    with caplog.at_level(logging.WARNING, logger="poss_lightning"):
        engine = speculate(target, tiny_draft(target, [4]), lookup=TAIL)
    assert not engine.exact and "exact are paths of up to 15 drafted or looked-up tokens" in caplog.text
    assert speculate(target, tiny_draft(target, [4]), lookup=TAIL - 1).exact == target.exact


def test_a_target_that_is_not_exact_is_refused_where_that_was_asked():
    model = tiny_model()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="exact is true, but attention is by eager"):
        Target(model, tiny_tokenizer(), "tiny", exact=True)
    assert not Target(model, tiny_tokenizer(), "tiny").exact
