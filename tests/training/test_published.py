"""Each file of conf/draft trains with the published loss: from the file through the parser to the loss of a step."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import published
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.files import conf_names
from poss_lightning.training.fit import compose
from poss_lightning.training.module import DraftModule
from tests.support import naive
from tests.support.tiny import spread
from tests.support.tolerance import LAYER, close

# Weights of the feature, token and top-k loss; passes; weight of a pass relative to the one before; what the mean is
# over. docs/METHOD.md, 12, says where they were read, and which depths are ours.
PUBLISHED = {
    "eagle": ((1.0, 0.1, 0.0), 1, 1.0, "slots"),
    **dict.fromkeys(("hass", "poss1", "poss2", "poss3"), ((1.0, 0.1, 1.0), 6, 1.0, "slots")),
    **dict.fromkeys(("eagle3", "eagle31"), ((0.0, 1.0, 0.0), 7, 0.8, "tokens")),
    "speed": ((0.0, 1.0, 0.0), 8, 0.9, "tokens"),
    "block": ((0.0, 1.0, 0.0), 7, 0.78, "slots"),
}
FILES = [name.removeprefix("draft/").removesuffix(".yaml") for name in conf_names() if name.startswith("draft/")]


@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_with_the_published_loss(name, inner):
    weights, depth, gamma, mean = PUBLISHED[name]
    options = compose("published.yaml", f"draft/{name}.yaml", {"data": {"store": inner}})["model"] | {"store": inner}
    options["vocabulary_size"] = options["vocabulary_size"] and 200  # the tiny target has 320 tokens
    torch.manual_seed(0)
    module = DraftModule(**options)
    spread(draft := module.draft)
    store = FeatureStore(inner).select(module.aux_layers)
    samples = [store[0], store[2]]
    batch = collate([[sample] for sample in samples])  # a row for each, as published
    module.trainer = SimpleNamespace(log_every_n_steps=0, global_step=0)
    ours = module.training_step(batch)

    embed_head, counts, features = module.embed_head, batch.mask.passes, batch.features[:, 1:]
    head, given = embed_head.head, (embed_head.embed(batch.tokens[:, 1:]), batch.draft_input[:, :-1])
    slots = torch.stack([(counts >= k).sum() for k in range(1, depth + 1)])
    if draft.config.predicts_feature:
        sums = torch.stack(published.step(draft, head, *given, features, counts, weights))
    else:
        predictions = [draft.head_input(predicted) for predicted in draft(*given, depth)]
        own_head = draft.lm_head.weight if draft.config.own_head else None
        if draft.config.own_head:  # no loss where the head has no row for the target's token
            counts = counts * embed_head.has_row(batch.target_argmax[:, 1:])
        sums = naive.pass_losses({"token": weights[1]}, predictions, features, counts, head, draft_head=own_head)
    divisor = slots if mean == "slots" else sum(len(sample.tokens) for sample in samples)
    assert draft.config.depth == depth == len(sums)
    total = (gamma ** torch.arange(depth) * sums / divisor).sum()
    assert close(ours, total, terms=len(head), sums=LAYER * depth)
