"""Block drafts: what a place sees, training ≡ drafting, the best tree of independent positions; no token changes."""

import itertools

import pytest
import torch

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.budget import Planner
from poss_lightning.decoding.drafter import make_drafter
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import ancestor_mask, rerank
from poss_lightning.draft import block
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import DraftOptions
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.features.online import OnlineFeatures
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.cache import Slots
from poss_lightning.training.start import begin_draft
from tests.support.decoders import drawn, speculate
from tests.support.tiny import tiny_draft
from tests.support.tolerance import LAYER, close
from tests.support.trees import given_noise
from tests.support.unrolling import BLOCKS, append, inputs, packed


def block_draft(deep, depth=6, kind="block", **config) -> DraftModel:
    draft = tiny_draft(deep, [depth], kind=kind, **config)
    draft.init_head(deep.embed_head)
    return draft


def test_what_a_place_sees_is_the_drawing():
    """Values are one-hot (a context's slot, or a block's place) and queries zero, so the output is the mask itself."""
    slots, places = 4, 3
    context, own = torch.eye(slots + slots * places).split([slots, slots * places])
    context, own = context[None, None], own.view(slots, 1, places, -1)  # (B, 1, T, d), (N, 1, P, d)
    packing = Packing.one_per_row(1, slots, own.device)
    out = block.attend_blocks(torch.zeros_like(own), (context, context), (own, own), torch.arange(slots), packing)
    columns = [*range(slots), *range(slots + places, slots + 3 * places)]
    drawn = [line.split()[4:] for line in block.__doc__.splitlines() if ", each" in line]
    for at, marks in zip((1, 2), drawn, strict=True):
        seen = out[at, 0][:, columns] > 0  # each of its places sees the same
        assert seen.tolist() == [[mark == "x" for mark in marks]] * places


@pytest.mark.parametrize("allocation, config", BLOCKS)
def test_some_blocks_are_those_of_all(deep, allocation, config):
    draft, rows = block_draft(deep, *allocation, **config), packed([[7, 12, 9], [28]], 28)
    _, embedded, read = inputs(deep, 28, batch=2, draft=draft)
    begins = torch.rand(2, 28, generator=torch.Generator().manual_seed(0)) < 0.3
    some = draft(embedded, read, 6, rows, begins.flatten().nonzero()[:, 0])
    every = draft(embedded, read, 6, rows)
    for k in range(6):
        begun = torch.nn.functional.pad(begins, (k, 0))[:, :28]  # k slots later
        assert close(some[k][begun], every[k][begun], sums=2 * LAYER)
        assert begun.sum() > 0 and not some[k][~begun].any()


@pytest.mark.parametrize("allocation, config", BLOCKS)
def test_what_is_drafted_is_what_was_trained(deep, allocation, config):
    """Two rows of different length, whose slots arrived in parts."""
    draft, counts = block_draft(deep, *allocation, **config), [12, 9]
    tokens, embedded, read = inputs(deep, 12, batch=2, draft=draft)
    drafter = make_drafter(draft, deep.embed_head, TreePlan(5, 6, 4))
    drafter.start(Slots(2, 12 + drafter.room, torch.device("cpu")))  # and no slot to spare
    for start, stop, of_rows in ((0, 7, [7, 7]), (7, 12, [5, 2])):
        append(drafter, tokens[:, start:stop], read[:, start:stop], of_rows)
        root = tokens.gather(1, drafter.slots.lengths[:, None] - 1)
        logits = drafter.block_logits(root)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 6)) for x in (embedded, read)]
    outputs = draft(*padded, 6)
    for row, count in enumerate(counts):
        trained = torch.stack([outputs[k][row, count - 1 + k] for k in range(5)])
        assert close(logits[row], draft.logits(trained, deep.embed_head), sums=2 * LAYER)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 320, 3)], ids=["all tokens", "some"])
@pytest.mark.parametrize("with_noise", [False, True])
def test_the_tree_holds_the_most_probable_prefixes(deep, with_noise, vocabulary):
    """Of all of them, one by one: 4 tokens at each of 3 positions."""
    draft, nodes = block_draft(deep, 3, block_layers=2, vocabulary=vocabulary), 17
    tokens, _, read = inputs(deep, 8, batch=2, draft=draft)
    drafter = make_drafter(draft, deep.embed_head, TreePlan(3, nodes, 4))
    drafter.start(Slots(2, 64, torch.device("cpu")))
    append(drafter, tokens, read, [8, 6])
    root = tokens.gather(1, torch.tensor([[7], [5]]))
    made = torch.randn(2, 4, 320, generator=torch.Generator().manual_seed(3))
    tree = rerank(drafter.draft(root, drafter.plan, given_noise(made) if with_noise else None), nodes)
    logits = drafter.block_logits(root).detach()  # (2, 3, V)
    if with_noise:
        logits = logits + (made[:, :3] if vocabulary is None else made[:, :3, vocabulary])
    chances, rows = logits.log_softmax(-1).topk(4, dim=-1)
    likely, seen = draft.token_ids(rows), ancestor_mask(tree.parents, 3)
    for row in range(2):
        prefixes = {}
        for length in (1, 2, 3):
            for choice in itertools.product(range(4), repeat=length):
                each = row, torch.arange(length), torch.tensor(choice)
                prefixes[tuple(likely[each].tolist())] = chances[each].sum().item()
        best = dict(sorted(prefixes.items(), key=lambda item: -item[1])[: nodes - 1])
        paths = [tuple(tree.tokens[row, on_path][1:].tolist()) for on_path in seen[row]]
        found = dict(zip(paths, tree.scores[row].tolist(), strict=True))
        del found[()]  # the root
        assert close(found, best, sums=2 * LAYER, dtype=torch.float32, of=3 * logits.abs().max())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_a_plan_that_is_shallower_than_the_block_changes_no_token(deep, monkeypatch, sampling):
    """And no tree is deeper than the plan, by which noise, ancestors and verdict are sized."""
    monkeypatch.setattr(Planner, "choose", lambda *_, **__: TreePlan(2, 7, 5))
    speculative = speculate(deep, block_draft(deep), 6, 20, 5, tree="auto")
    trees = []
    expected = drawn(Autoregressive(deep), sampling, 0, limit=24)
    draft = speculative.drafter.draft
    speculative.drafter.draft = lambda *given: trees.append(draft(*given)) or trees[-1]
    assert drawn(speculative, sampling, 0, limit=24) == expected
    deepest = [int(ancestor_mask(tree.parents, 6).sum(-1).max()) - 1 for tree in trees]
    assert deepest[-1] == 2 and set(deepest) <= {2, 6}  # 6 where it measures
    assert all(costs.steps == 1 for costs in speculative.auto.measured.values())  # whatever the depth


def test_a_start_gives_all_its_weights_to_a_block_that_reads_and_masks_the_same(deep, tmp_path):
    config = {"block_layers": 2, "inner_layers": (1, 3), "mask_token": 5, "norm_eps": 0.01}
    start, source = block_draft(deep, seed=7, **config), OnlineFeatures(deep, [])
    start.save_pretrained(tmp_path)
    options = DraftOptions(allocation=(6,), kind="block", block_layers=2)
    draft, _ = begin_draft(source, options, str(tmp_path), normalise=False, anchors=None)
    assert {name: getattr(draft.config, name) for name in config} == config
    assert all(map(torch.equal, draft.state_dict().values(), start.state_dict().values()))
    with pytest.raises(ValueError, match="has kind block, and this one eagle3"):
        begin_draft(source, DraftOptions(kind="eagle3"), str(tmp_path), normalise=False, anchors=None)
