"""TensorBoard: no chart is empty, histograms agree with the scalars; a validation replays held-out answers."""

import re
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.evaluation.probe import Replay, answered_samples
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import collate
from poss_lightning.metrics import BINS
from poss_lightning.training.callbacks import DraftFolders
from poss_lightning.training.dashboard import Dashboard
from poss_lightning.training.module import DraftModule
from tests.support.tolerance import close

DEPTH = 4
FORGED = "<img src=x onerror=alert(1)> **bold** [link](x) \x1b[2J"  # a name, or what somebody wrote


def replayed(*callbacks) -> list[lightning.Callback]:
    return [Replay(10**6, nodes=12, tree_width=4), Dashboard(), *callbacks]


@pytest.fixture(scope="module")
def run(learn, store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / FORGED
    learn(store, 20, folder, replayed())
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    return SimpleNamespace(folder=folder, events=events)


def test_a_chart_shows_one_scalar_that_was_logged(run):
    """Colours distinguish runs, so a chart of several scalars would have lines that look alike."""
    tags, written = run.events.Tags()["scalars"], run.events.Tensors("custom_scalars__config__")[0].tensor_proto
    for category in layout_pb2.Layout.FromString(written.string_val[0]).category:
        for chart in category.chart:
            (pattern,) = chart.multiline.tag
            shown = [tag for tag in tags if re.match(pattern, tag)]
            assert len(shown) == 1, pattern


def test_histograms_agree_with_mean_drift(run):
    for k in range(1, DEPTH + 1):
        drawn = run.events.Histograms(f"val_drift_cosine_by_slot/depth_{k}")
        means = run.events.Scalars(f"val_drift_cosine/depth_{k}")
        for one, mean in zip(drawn, means, strict=True):
            shape = one.histogram_value
            assert sum(shape.bucket) == shape.num > 0 and len(shape.bucket) == len(shape.bucket_limit)
            assert abs(shape.sum / shape.num - mean.value) <= 1 / BINS  # half a bin


def test_nothing_is_rendered_as_markdown(run):
    """TensorBoard turns texts and descriptions into HTML, so there are none; names and values it shows as they are."""
    noted = run.events.summary_metadata.values()
    assert not any(each.summary_description or each.plugin_data.plugin_name == "text" for each in noted)


def test_validation_replays_the_held_out_answers(learn, store):
    trainer = learn(store, 6, callbacks=replayed(), vocabulary_size=100)
    data, draft, logged = trainer.datamodule, trainer.lightning_module.draft.eval(), trainer.callback_metrics
    held = [data.source[i] for i in data.held_out]
    for kind, nodes, tree_width in (("chain", DEPTH + 1, 1), ("tree", 12, 4)):
        found = replay_rounds(draft, data.source.embed_head(), held, TreePlan(DEPTH, nodes, tree_width))
        rounds = [count for sample in found for answer in sample for count in answer]
        tau = sum(count + 1 for count in rounds) / len(rounds)
        assert close(logged[f"val/tau_{kind}"], tau)
    assert tau > 1
    values = [float(logged[f"val_pos_acc_tree/depth_{k}"]) for k in range(1, DEPTH + 1)]  # 0 where none was reached
    assert close(logged["val_pos_acc_tree/mean"], sum(values) / DEPTH, dtype=torch.float32)
    assert close(1 + np.cumprod(values).sum(), tau, dtype=torch.float32)


def test_answers_of_two_tokens_or_more_are_replayed():
    tokens = torch.arange(20)
    for spans, long in (([(3, 5), (6, 7), (8, 20)], [(3, 5), (8, 20)]), ([(0, 2), (5, 6)], []), ([], [])):
        batch = collate([[Sample("a", tokens, tokens, spans, torch.zeros(20, 4))]])
        assert [sample.spans for sample in answered_samples(batch)] == ([long] if long else [])


def test_answers_too_short_for_a_round_do_not_end_a_training(store, train, tmp_path, monkeypatch):
    """Then τ is nan, which a checkpoint may monitor; loggers and the best draft leave it out."""
    monkeypatch.setattr("poss_lightning.evaluation.probe.answered_samples", lambda batch: [])
    watch = ModelCheckpoint(tmp_path, monitor="val/tau_tree", mode="max")
    with pytest.warns(UserWarning, match="there is no val/tau_tree, as no answer is long enough"):
        trainer = train(
            DraftModule([1], store),
            max_steps=2,
            val_check_interval=1,
            enable_checkpointing=True,
            logger=CSVLogger(tmp_path, name="", version=""),
            callbacks=[Replay(), DraftFolders(), watch],
        )
    assert trainer.global_step == 2 and not (tmp_path / "draft-best").exists() and (tmp_path / "draft-last").exists()
    assert "val/tau_tree" not in (tmp_path / "metrics.csv").read_text()
