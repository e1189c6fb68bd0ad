"""The FLOPs by which `make bench-train` divides a step's time are those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train import step_flops
from poss_lightning.losses.chunks import Heads
from poss_lightning.losses.passes import LossSpec, pass_losses
from tests.support.tiny import tiny_draft


@pytest.mark.parametrize(
    ("allocation", "options"),
    [
        ([3], {}),
        ([1, 2], {"detach": False}),
        ([1, 1, 1], {"kind": "eagle3"}),
        ([4], {"kind": "block", "block_layers": 2}),
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(target, deep, allocation, options):
    """All but attention's, the only batched products: torch counts them twice, as backward recomputes them."""
    draft, depth = tiny_draft(deep, allocation, **options), sum(allocation)
    config = draft.config
    embedded, features = torch.randn(2, 1, 24, 32)
    inputs = torch.randn(1, 24, 96 if config.aux_layers else 32)
    counts = (torch.arange(24) % (depth + 1))[None]
    heads = Heads(target.embed_head.head, draft.lm_head.weight if config.own_head else None)
    with FlopCounterMode(display=False) as counter:
        outputs = draft(embedded, inputs, depth, begins=(counts > 0).flatten().nonzero()[:, 0])
        passes = [draft.head_input(output) for output in outputs]
        pass_losses(passes, features, counts, heads, LossSpec(terms={"token": 1.0})).total.backward()
    plain = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
    slots = int((counts > 0).sum())
    flops = step_flops(config, vocabulary=target.spec.vocab_size, tokens=24, slots=slots, context=0.0)
    in_blocks = 2 * slots * 3 * 2 * 5 * 2 * 32 * 5 if config.one_pass else 0  # places attend to their own block
    assert flops - in_blocks == sum(plain.values())


def test_flops_of_attention_are_three_times_those_of_its_forward(target):
    config = tiny_draft(target, [2, 2]).config
    queries, keys = torch.randn(2, 4, 24, 8)
    with FlopCounterMode(display=False) as counter:
        (queries @ keys.mT) @ keys
    near, far = (step_flops(config, vocabulary=320, tokens=24, slots=24, context=keys) for keys in (0.0, 24.0))
    assert far - near == 3 * config.depth * counter.get_total_flops()
