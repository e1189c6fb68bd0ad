"""Training through Lightning on the tiny target: it learns, it logs, and padding changes nothing."""

import math
import pickle
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.nn.functional import pad

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.evaluation.probe import Replay, answered_samples
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.features.stream import collate
from poss_lightning.losses.slot_weights import draw_chains
from poss_lightning.metrics import BINS
from poss_lightning.target_model.model import Target
from poss_lightning.training.callbacks import DraftFolders, Throughput
from poss_lightning.training.dashboard import Dashboard
from poss_lightning.training.module import DraftModule
from poss_lightning.training.unrolled import unrolled_losses
from tests.support.decoders import speculate, tokens_of
from tests.support.talks import BLOCK, EAGLE3
from tests.support.tiny import tiny_target
from tests.support.tolerance import LAYER, close
from tests.support.training import fit, quiet_trainer, train

pytestmark = pytest.mark.usefixtures("short_replays")


def learn(store, steps, folder=None, callbacks=(), precision="32-true", **draft) -> lightning.Trainer:
    """Train two specialists, or a draft of other options, with two validations; TensorBoard's file is in `folder`."""
    lightning.seed_everything(0)
    options = {"allocation": [2, 2], "learning_rate": 3e-3, "warmup": 0.05} | draft
    return train(
        DraftModule(store=store, **options),
        FeatureDataModule(store, batch_tokens=512, validation=0.2),
        logger=TensorBoardLogger(folder, name="", version="") if folder else False,
        max_steps=steps,
        precision=precision,
        val_check_interval=steps // 2,
        check_val_every_n_epoch=None,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        callbacks=[*callbacks],
    )


def batch_of(source, indices, layers):
    """A batch of one row with these conversations of a store."""
    return collate([[FeatureStore(source).select(layers)[i] for i in indices]])


def test_precision_is_the_trainer_s_and_not_the_store_s(store, make_store, tiny_folder):
    losses = []
    for source in (store, make_store(Target.load(tiny_folder, "bfloat16"))):
        trainer = learn(source, 4, precision="bf16-mixed")
        embed_head = trainer.lightning_module.embed_head
        assert embed_head.head.dtype == embed_head.embedding.dtype == torch.bfloat16
        losses.append(float(trainer.callback_metrics["val/loss"]))
    assert close(*losses, sums=2 * LAYER, dtype=torch.bfloat16)  # as two layers of the target round


def test_the_loss_of_some_anchors_is_that_of_all_on_average(inner):
    """Those that are drawn carry the weights of the others."""
    lightning.seed_everything(0)
    module = DraftModule([4], inner, **BLOCK)
    batch = batch_of(inner, (0, 20, 39), module.aux_layers)
    begins = batch.mask.passes > 0

    def loss(chains):
        with torch.no_grad():
            return unrolled_losses(module.draft, module.embed_head, batch, 4, module.loss, chains=chains)[0].weighted

    some = torch.stack([loss(draw_chains(begins, 5, seed)) for seed in range(100)])
    error = some.std(0) / 100**0.5
    assert ((some.mean(0) - loss(None)).abs() < 4 * error).all() and (error > 0).all()


KINDS = {  # options; steps; how far the loss falls, as the target's own entropy remains
    "eagle2": ({}, 40, 0.92),
    "muon": ({"optimizer": "muon"}, 60, 0.95),
    "eagle3": (EAGLE3 | {"vocabulary_size": 200}, 30, 0.97),
    "block": (BLOCK | {"allocation": [4], "anchors": 12}, 30, 0.97),
}
DEPTH = 4


@pytest.fixture(scope="module", params=KINDS)
def run(request, inner, tmp_path_factory):
    """What a training of a kind of draft writes and logs, for all tests that look at it."""
    options, steps, _ = KINDS[request.param]
    folder = tmp_path_factory.mktemp("run")
    callbacks = [Replay(10**6, nodes=12, tree_width=DEPTH), Dashboard(), DraftFolders()]
    trainer = learn(inner, steps, folder, callbacks, **options)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    kind, tags = options.get("kind", "eagle2"), events.Tags()["scalars"]
    return SimpleNamespace(name=request.param, folder=folder, trainer=trainer, events=events, kind=kind, tags=tags)


def test_it_learns_logs_and_writes_a_draft_that_drafts_without_loss(run):
    losses = [event.value for event in run.events.Scalars("train/loss")]
    assert losses[-1] < KINDS[run.name][2] * losses[0]
    by_depth = {f"{group}/depth_{k}" for k in range(1, 5) for group in ("train_loss", "val_loss", "val_token_loss")}
    drift = {f"val_drift_cosine/depth_{k}" for k in range(1, 5)}
    assert by_depth | {"val_pos_acc_unroll/depth_1"} | (drift if run.kind == "eagle2" else set()) <= {*run.tags}
    assert any("drift" in tag or "feature" in tag for tag in run.tags) == (run.kind == "eagle2")
    target = tiny_target(num_hidden_layers=7)
    for folder in ("draft-best", "draft-last"):
        draft = load_draft(run.folder / folder)
        assert draft.config.kind == run.kind and draft.config.target == target.spec
        assert tokens_of(speculate(target, draft)) == tokens_of(Autoregressive(target))


def test_a_chart_shows_one_scalar_that_was_logged(run):
    """Colours distinguish runs, so a chart of several scalars would have lines that look alike."""
    written = run.events.Tensors("custom_scalars__config__")[0].tensor_proto
    for category in layout_pb2.Layout.FromString(written.string_val[0]).category:
        for chart in category.chart:
            (pattern,) = chart.multiline.tag
            shown = [tag for tag in run.tags if re.match(pattern, tag)]
            assert len(shown) == (run.kind == "eagle2" or "drift" not in pattern), pattern


def test_histograms_agree_with_mean_drift(run):
    for k in range(1, DEPTH + 1) if run.kind == "eagle2" else ():
        drawn = run.events.Histograms(f"val_drift_cosine_by_slot/depth_{k}")
        means = run.events.Scalars(f"val_drift_cosine/depth_{k}")
        for one, mean in zip(drawn, means, strict=True):
            shape = one.histogram_value
            assert sum(shape.bucket) == shape.num > 0 and len(shape.bucket) == len(shape.bucket_limit)
            assert abs(shape.sum / shape.num - mean.value) <= 1 / BINS  # half a bin


def test_validation_replays_the_held_out_answers(run):
    data, draft = run.trainer.datamodule, run.trainer.lightning_module.draft.eval()
    logged = run.trainer.callback_metrics
    held = [data.source[i] for i in data.held_out]
    for kind, nodes, tree_width in (("chain", DEPTH + 1, 1), ("tree", 12, 4)):
        found = replay_rounds(draft, data.source.embed_head(), held, TreePlan(DEPTH, nodes, tree_width))
        rounds = [count for sample in found for answer in sample for count in answer]
        tau = sum(count + 1 for count in rounds) / len(rounds)
        assert close(logged[f"val/tau_{kind}"], tau)
    assert tau > 1 or run.name != "eagle3"  # some guesses are right by then
    values = [float(logged[f"val_pos_acc_tree/depth_{k}"]) for k in range(1, DEPTH + 1)]  # 0 where none was reached
    assert close(logged["val_pos_acc_tree/mean"], sum(values) / DEPTH, dtype=torch.float32)
    assert close(1 + np.cumprod(values).sum(), tau, dtype=torch.float32)


def test_answers_of_two_tokens_or_more_are_replayed():
    tokens = torch.arange(20)
    for spans, long in (([(3, 5), (6, 7), (8, 20)], [(3, 5), (8, 20)]), ([(0, 2), (5, 6)], []), ([], [])):
        batch = collate([[Sample("a", tokens, tokens, spans, torch.zeros(20, 4))]])
        assert [sample.spans for sample in answered_samples(batch)] == ([long] if long else [])


def test_answers_too_short_for_a_round_do_not_end_a_training(store, tmp_path, monkeypatch):
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


def test_an_own_head_keeps_the_vocabulary_of_its_start(inner, tmp_path):
    """As SPEED keeps EAGLE-3's, whatever is common in the new store; for a different size it is chosen again."""

    def begin(allocation, size, **options) -> DraftModel:
        return DraftModule(allocation, inner, **EAGLE3, vocabulary_size=size, **options).draft

    odd = make_draft(begin([4], 200).config, torch.arange(120, 320))
    odd.save_pretrained(tmp_path / "odd")
    kept, same, fewer, whole = (
        begin([2, 2], size, kv="shared", start_from=str(tmp_path / "odd")) for size in (None, 200, 100, 320)
    )
    for draft in (kept, same):
        assert draft.vocabulary.equal(odd.vocabulary) and draft.config.vocabulary_size == 200
        assert draft.lm_head.weight.equal(odd.lm_head.weight)
    assert fewer.vocabulary.equal(FeatureStore(inner).common_tokens(100)) and whole.vocabulary is None


def test_samples_have_only_the_layers_that_are_read(inner):
    whole = FeatureStore(inner)
    outputs = dict(zip(whole.manifest.layers, whole[3].layers.unbind(1), strict=True))
    chosen = pickle.loads(pickle.dumps(whole.select((4, 2))))[3]  # as a loader's process gets it
    assert torch.equal(chosen.layers, torch.stack([outputs[4], outputs[2]], dim=1))
    assert torch.equal(chosen.draft_input, torch.cat([outputs[4], outputs[2]], dim=1))


def test_a_batch_that_only_fills_up_a_step_is_not_logged(store):
    """At the end of an epoch, the logged loss is that of the last real batch."""
    logged = []

    def watch(trainer, module, outputs, batch, batch_idx):
        logged.append((not batch.mask.is_empty, float(trainer.callback_metrics["train/loss"])))

    data = FeatureDataModule(store, batch_tokens=512, validation=0.2)
    options = {"max_epochs": 1, "accumulate_grad_batches": 7, "limit_val_batches": 0, "log_every_n_steps": 1}
    module, watching = DraftModule([2], store), LambdaCallback(on_train_batch_end=watch)
    train(module, data, callbacks=[watching], **options)
    assert not logged[-1][0] and all(loss > 0 for _, loss in logged)
    assert logged[-1][1] == [loss for real, loss in logged if real][-1]


def with_passes(batch, passes):
    return replace(batch, mask=replace(batch.mask, passes=passes))


def logged_values(module, batch) -> dict[str, float]:
    """What a step of training and then a validation log of a batch."""
    logged: dict[str, float] = {}
    module._trainer = quiet_trainer(log_every_n_steps=1)
    module._trainer.strategy.optimizers = [torch.optim.SGD(module.draft.parameters())]
    module.log = lambda name, value, **_: logged.update({name: float(value)})
    module.training_step(batch)
    module.validation_step(batch)
    module.on_validation_epoch_end()
    return logged


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_position_without_slots_adds_nothing_to_the_loss(inner, kind):
    """Answers are shorter than the depth; or the draft's own head has none of the tokens there."""
    lightning.seed_everything(0)
    options = EAGLE3 | {"vocabulary_size": 200} if kind == "eagle3" else {}
    module = DraftModule([2, 2], inner, **options | {"gamma": 0.7})
    batch = batch_of(inner, range(0, 40, 4), module.aux_layers)
    if kind == "eagle2":
        short = with_passes(batch, batch.mask.passes.clamp(max=2))
    else:
        unknown = int((~module.embed_head.has_row(torch.arange(320))).nonzero()[0])
        late = pad(batch.mask.passes, (1, 0)) > 2
        short = replace(batch, target_argmax=batch.target_argmax.masked_fill(late, unknown))
    logged = logged_values(module, short)
    assert logged["val/loss"] > 0 and close(logged["val/loss"], logged["train/loss"], dtype=torch.float32)
    by_depth = [logged.get(f"val_loss/depth_{k}") for k in range(1, 5)]
    assert close(logged["val/loss"], by_depth[0] + 0.7 * by_depth[1], dtype=torch.float32)
    assert by_depth[2:] == [None, None]
    none = logged_values(module, with_passes(batch, torch.zeros_like(batch.mask.passes)))
    assert math.isnan(none.pop("val/loss"))  # and no smallest loss, which would make the best draft
    assert not any(map(math.isnan, none.values()))


def test_throughput_counts_all_batches_between_two_logs(store, tmp_path):
    logged, shown = {}, []

    class Seen(Throughput):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            before = self.slots + len(batch.mask.slots)
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            shown.append(len(batch.mask.slots))
            if self.slots == 0:
                logged[trainer.global_step] = before

    options = {"accumulate_grad_batches": 2, "limit_val_batches": 1, "val_check_interval": 3, "log_every_n_steps": 4}
    trainer = fit(store, tmp_path, Seen(), max_steps=10, max_epochs=-1, **options).trainer
    assert logged == {4: sum(shown[:8]), 8: sum(shown[8:16])}
    assert trainer.callback_metrics["throughput/slots_per_second"] > 0


def test_the_schedule_rises_then_falls_to_nothing(store):
    module = DraftModule([2], store, learning_rate=1.0, warmup=0.1)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module.trainer = SimpleNamespace(estimated_stepping_batches=100, max_steps=-1, strategy=strategy)
    (factor,) = module.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas
    values = [factor(step) for step in range(101)]
    assert close(values[:10], [(i + 1) / 10 for i in range(10)])
    assert values[10] == 1 and values[100] == 0
    assert all(a > b for a, b in pairwise(values[10:]))


def test_a_validation_is_as_deep_as_decoding_be_it_a_single_pass(store):
    deep = DraftModule([6], store, depth=1)
    assert (deep.draft.config.depth, deep.eval_depth) == (1, 6)
    data = FeatureDataModule(store, batch_tokens=512, validation=0.2)
    (values,) = quiet_trainer().validate(DraftModule([1], store), data, verbose=False)
    assert "val_drift_cosine/depth_1" in values and "val_drift_cosine/depth_2" not in values
