"""Training ≡ decoding: the unroll, the drawing of what it sees, and who gets a gradient."""

import pytest
import torch

from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import ancestor_mask
from poss_lightning.draft import attention, unroll
from poss_lightning.draft.attention import Packing, attend
from poss_lightning.target_model.cache import Slots
from tests.support import naive
from tests.support.steps import Largest
from tests.support.tiny import tiny_draft
from tests.support.tolerance import LAYER, close
from tests.support.trees import given_noise
from tests.support.unrolling import BLOCKS, KINDS, append, inputs, packed_padded_alone, unroll_what_is_drafted


def test_what_a_pass_sees_is_the_drawing():
    """Values are one-hot (set, slot) and queries zero, so the output is the mask itself, row by row."""
    k, slots = 3, 6
    values = torch.eye(k * slots).view(k, 1, 1, slots, k * slots)  # (set, B, H, T, d)
    context, *diagonals = ((each, each) for each in values)
    packing = Packing.one_per_row(1, slots, values.device)
    attended = attend(torch.zeros_like(values[0]), context, diagonals[::-1], packing)[0, 0]  # (T, d)
    seen = (attended.view(slots, k, slots) > 0)[k - 1 :]  # (t, set, s)
    assert seen.sum(1).max() == 1
    sets = torch.where(seen.any(1), seen.int().argmax(1), -1).tolist()
    drawn = [line.split()[-slots:] for line in unroll.__doc__.splitlines() if line.endswith((" .", " 2"))]
    assert [["." if each < 0 else str(each) for each in row] for row in sets] == drawn


ENDS = [([1, 1, 1], {"kind": kind, "detach": own}) for kind in ("eagle2", "eagle3") for own in (True, False)]


@pytest.mark.parametrize("allocation, config", [*KINDS, *BLOCKS])
def test_every_pass_at_every_slot_is_what_its_definition_gives(deep, allocation, config):
    draft = tiny_draft(deep, allocation, **config)
    draft.init_head(deep.embed_head)
    depth, count = 6 if draft.config.one_pass else 8, 12  # two past the allocation, for the last specialist
    _, embedded, features = inputs(deep, count, draft=draft)
    passes = draft(embedded, features, depth)
    for start in range(count):
        if draft.config.one_pass:
            outputs = naive.block(draft, embedded[0], features[0], start)[1:]
        else:
            outputs = naive.chain(draft, embedded[0], features[0], start, depth)
        for slot, (output, expected) in enumerate(zip(passes, outputs, strict=False), start):
            if slot < count:
                assert close(output[0, slot], expected, sums=depth * LAYER)


@pytest.mark.parametrize("allocation, config", KINDS)
def test_unroll_is_what_the_cached_drafter_drafts(deep, allocation, config):
    unrolled, drafted, agree = unroll_what_is_drafted(deep, tiny_draft(deep, allocation, **config))
    assert close(unrolled, drafted, sums=6 * LAYER) and agree


@pytest.mark.parametrize("allocation, config", KINDS)
def test_every_node_of_a_tree_is_scored_as_its_path_alone(deep, allocation, config):
    """Two rows of different length, with the noise of a draw; the unroll knows nothing of trees or frontiers."""
    draft, depth, counts = tiny_draft(deep, allocation, **config), 4, [12, 9]
    tokens, _, features = inputs(deep, 12, batch=2, draft=draft)
    drafter = TreeDrafter(draft, deep.embed_head, TreePlan(depth, 40, 4))
    drafter.start(Slots(2, 64, torch.device("cpu")))
    append(drafter, tokens, features, counts)
    root = tokens.gather(1, torch.tensor(counts)[:, None] - 1)
    noise = torch.randn(2, depth + 1, 320, generator=torch.Generator().manual_seed(3))
    tree = drafter.draft(root, drafter.plan, given_noise(noise))
    seen = ancestor_mask(tree.parents, depth)
    for row, count in enumerate(counts):
        for node in range(1, tree.tokens.shape[1]):
            path = tree.tokens[row, seen[row, node]][1:]  # without the root
            text = torch.cat([tokens[row, :count], path])
            known = torch.nn.functional.pad(features[row, :count], (0, 0, 0, len(path)))
            passes = draft(deep.embed_head.embed(text)[None], known[None], len(path))
            predicted = torch.stack([output[0, count - 1 + k] for k, output in enumerate(passes)])  # (K, D)
            logits = draft.logits(predicted, deep.embed_head) + noise[row, : len(path)]
            expected = logits.log_softmax(-1)[range(len(path)), path].sum()
            summed = len(path) * logits.abs().max()
            assert close(tree.scores[row, node], expected, sums=depth * LAYER, of=summed)


@pytest.mark.parametrize("allocation, config", [*KINDS, *BLOCKS])
def test_packed_is_padded_is_alone(deep, allocation, config):
    """In outputs and gradients; only slots that are real in a pass are read, as a loss would."""
    together, rows, alone = packed_padded_alone(deep, tiny_draft(deep, allocation, **config))
    for outputs, gradients in (together, rows):
        assert close(outputs, alone.outputs, sums=6 * LAYER) and close(gradients, alone.gradients, sums=3 * 6 * LAYER)


def test_no_scores_of_all_slots_with_all_are_ever_made(deep, monkeypatch):
    """Nothing in forward or backward is as large as T x T, so memory grows linearly in T."""
    monkeypatch.setattr(attention, "QUERY_ROWS", 8)
    draft, count = tiny_draft(deep, [2, 2]), 160
    _, embedded, features = inputs(deep, count)
    with Largest() as made:
        sum(p.square().sum() for p in draft(embedded, features, 4)).backward()
    assert made.largest < count * count


@pytest.mark.parametrize("allocation, config", KINDS)
def test_a_specialist_learns_from_its_own_positions_only(deep, allocation, config):
    draft = tiny_draft(deep, allocation, **config)
    _, embedded, features = inputs(deep, draft=draft)
    for k in (1, 2, 4, 6):
        draft.zero_grad()
        draft(embedded, features, 6)[k - 1][:, 6:].square().sum().backward()
        learnt = {i: [p.grad for p in layer.parameters()] for i, layer in enumerate(draft.layers)}
        touched = {i for i, gradients in learnt.items() if any(gradient is not None for gradient in gradients)}
        first = 1 if config.get("kv") == "shared" else k  # whose keys it reads
        assert touched == {draft.config.specialist_at(m) for m in range(first, k + 1)}


@pytest.mark.parametrize("allocation, config", [*ENDS, *BLOCKS])
def test_every_parameter_gets_a_gradient(deep, allocation, config):
    """Of the last pass alone where features are not detached: then earlier specialists learn from it, too."""
    draft = tiny_draft(deep, allocation, **config)
    draft.init_head(deep.embed_head)
    _, embedded, features = inputs(deep, draft=draft)
    passes = draft(embedded, features, 3)[0 if config.get("detach", True) else 2 :]
    sum(draft.logits(output, deep.embed_head).square().sum() for output in passes).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())


@pytest.mark.parametrize(("kv", "counts", "layers"), [("separate", [2, 4, 6], 3), ("shared", [2, 2, 2], 1)])
def test_keys_are_made_once_for_every_specialist_that_reads_them_and_stored_so(deep, kv, counts, layers):
    """Separately those of the sets 0..1, 0..3 and 0..5; of a shared cache each slot's once."""
    draft, calls = tiny_draft(deep, [2, 2, 2], kv=kv), []
    drafter = TreeDrafter(draft, deep.embed_head, TreePlan())
    drafter.start(Slots(1, 128, torch.device("cpu")))
    assert len(drafter.store.slots) == layers
    _, embedded, features = inputs(deep)
    for layer in draft.layers:
        layer.keys_values = lambda z, rope, layer=layer, plain=layer.keys_values: calls.append(layer) or plain(z, rope)
    draft(embedded, features, 6)
    assert [calls.count(layer) for layer in draft.layers] == counts
