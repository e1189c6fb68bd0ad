"""Training through Lightning on the tiny target: it learns, it logs, and padding changes nothing."""

import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.manifest import StoreError
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.losses.slot_weights import draw_chains
from poss_lightning.target.model import Target
from poss_lightning.training.callbacks import DraftFolders, Throughput
from poss_lightning.training.dashboard import Dashboard
from poss_lightning.training.fit import command_line
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.muon import Muon
from tests.support import naive
from tests.support.decoders import tokens_of
from tests.support.ranks import QUIET
from tests.support.talks import BLOCK, EAGLE3
from tests.support.tiny import tiny_target

CPU = {"accelerator": "cpu", "num_sanity_val_steps": 0, **QUIET}


@pytest.fixture(scope="module")
def inner(make_store):
    """A store with inner layers, one more than a draft reads."""
    return make_store(tiny_target(num_hidden_layers=7), layers=(2, 6, 3, 4))


def fit(store, folder, steps=60, callbacks=(), resume=None, precision="32-true", allocation=(2, 2), **changes):
    lightning.seed_everything(0)
    module = SpecialistTraining(store, list(allocation), learning_rate=3e-3, warmup=0.05, **changes)
    trainer = lightning.Trainer(
        **CPU | {"logger": TensorBoardLogger(folder, name="", version="")},
        max_steps=steps,
        precision=precision,
        val_check_interval=steps // 2,
        check_val_every_n_epoch=None,
        gradient_clip_val=0.5,
        log_every_n_steps=5,
        callbacks=[*callbacks, DraftFolders("val/loss", "min")],
    )
    trainer.fit(module, FeatureData(store, batch_tokens=512, validation=0.2), ckpt_path=resume)
    return module, trainer


def test_precision_is_the_trainer_s_and_not_the_store_s(store, make_store, tiny_folder, tmp_path):
    half, losses = make_store(Target.load(tiny_folder, "bfloat16")), []
    for name, source in (("float32", store), ("half", half)):
        module, trainer = fit(source, tmp_path / name, steps=4, precision="bf16-mixed")
        assert module.embed_head.head.dtype == module.embed_head.embedding.dtype == torch.bfloat16
        losses.append(float(trainer.callback_metrics["val/loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_loss_of_some_anchors_is_that_of_all_on_average(inner):
    """Those that are drawn carry the weights of the others."""
    lightning.seed_everything(0)
    module = SpecialistTraining(inner, [4], **BLOCK)
    batch = collate([[FeatureStore(inner).select(module.draft.config.layers)[i]] for i in (0, 20, 39)])
    begins = batch.counts[:, :-1] > 0

    def loss(chains):
        with torch.no_grad():
            return module._losses(batch, 4, chains=chains)[0].weighted

    some = torch.stack([loss(draw_chains(begins, 5, seed)) for seed in range(300)])
    error = some.std(0) / 300**0.5
    assert ((some.mean(0) - loss(None)).abs() < 4 * error).all() and (error > 0).all()
    with pytest.raises(ValueError, match="anchors is 8, and the passes of a draft of kind eagle2 are over all slots"):
        SpecialistTraining(inner, [4], anchors=8)


def test_muon_learns_and_all_its_gradients_are_clipped_together(store, tmp_path):
    norms, plain = [], Muon._step_matrices

    def watch(self, group):
        every = [p.grad for own in self.param_groups for p in own["params"] if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(every).item())
        return plain(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Muon, "_step_matrices", watch)
        fit(store, tmp_path, optimizer="muon")
    assert len(norms) == 60 and max(norms) <= 0.5 + 1e-3 and min(norms) > 0.4
    learns(tmp_path, 0.95)


def learns(folder, ratio: float) -> set[str]:
    """Check that the loss falls; return the names of the scalars that were logged."""
    events = EventAccumulator(str(folder)).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses[-1] < ratio * losses[0]  # the target's own entropy remains
    names = set(events.Tags()["scalars"])
    by_depth = {f"{group}/depth_{k}" for k in range(1, 5) for group in ("train_loss", "val_loss", "val_token_loss")}
    assert by_depth | {"val_pos_acc_unroll/depth_1"} <= names
    return names


def test_it_learns_logs_and_writes_a_draft(store, tmp_path, recwarn):
    fit(store, tmp_path)
    assert not any("draft-best" in str(warning.message) for warning in recwarn)
    assert {f"val_drift_cosine/depth_{k}" for k in range(1, 5)} <= learns(tmp_path, 0.9)
    draft = Specialists.from_pretrained(tmp_path / "draft-best")
    assert draft.config.allocation == (2, 2) and draft.config.target == FeatureStore(store).manifest.target
    assert (tmp_path / "draft-last" / "model.safetensors").is_file()


def test_an_eagle_3_draft_learns_with_its_head_and_logs_no_drift(inner, tmp_path):
    fit(inner, tmp_path, steps=30, **EAGLE3, vocabulary_size=200, callbacks=[Dashboard()])
    assert not any("drift" in name or "feature" in name for name in learns(tmp_path, 0.97))
    draft = Specialists.from_pretrained(tmp_path / "draft-best")
    assert draft.config.kind == "eagle3" and len(draft.vocabulary) == 200
    start = FeatureStore(inner).embed_head().head[draft.vocabulary]
    assert draft.lm_head.weight.shape == start.shape and not torch.equal(draft.lm_head.weight, start)


def test_a_block_learns_logs_no_drift_and_drafts_without_loss(inner, tmp_path):
    module, _ = fit(inner, tmp_path, steps=30, allocation=[4], **BLOCK, anchors=12, callbacks=[Dashboard()])
    assert not any("drift" in name or "feature" in name for name in learns(tmp_path, 0.97))
    draft = Specialists.from_pretrained(tmp_path / "draft-last")
    assert torch.equal(draft.mask, module.embed_head.embedding[-1])
    target = tiny_target(num_hidden_layers=7)
    assert tokens_of(Speculative(target, draft)) == tokens_of(Autoregressive(target))


@pytest.mark.parametrize("size", [200, None])
def test_an_own_head_learns_within_its_vocabulary(inner, size):
    """Where the target's most likely token is in the vocabulary, and from the target's distribution over it."""
    lightning.seed_everything(0)
    module = SpecialistTraining(inner, [2, 2], **EAGLE3, vocabulary_size=size)
    batch = collate([[FeatureStore(inner).select((2, 3, 4))[i]] for i in (5, 30)])
    assert batch.draft_input.shape[-1] == 3 * batch.features.shape[-1]
    losses, predictions = module._losses(batch, 4)
    kept = range(320) if size is None else module.draft.vocabulary.tolist()
    counts = batch.counts[:, :-1].clone()
    for row, slot in counts.nonzero().tolist():
        counts[row, slot] *= int(batch.greedy[row, slot + 1]) in kept
    assert size is None or 0 < (counts > 0).sum() < (batch.counts[:, :-1] > 0).sum()
    read = [module.draft.norm(prediction) for prediction in predictions]
    given = read, batch.features[:, 1:], counts, module.embed_head.head
    torch.testing.assert_close(
        losses.weighted.double(),
        naive.pass_losses({"token": 1.0}, *given, draft_head=module.draft.lm_head.weight),
        rtol=1e-4,
        atol=1e-4,
    )


def test_an_own_head_keeps_the_vocabulary_of_its_start(inner, tmp_path):
    """As SPEED keeps EAGLE-3's, whatever is common in the new store; for a different size it is chosen again."""
    given = SpecialistTraining(inner, [4], **EAGLE3, vocabulary_size=200).draft
    odd = Specialists(given.config, torch.arange(120, 320))
    odd.save_pretrained(tmp_path / "odd")
    speed = EAGLE3 | {"kv": "shared", "start_from": str(tmp_path / "odd")}
    for size in (None, 200):
        draft = SpecialistTraining(inner, [2, 2], **speed, vocabulary_size=size).draft
        assert draft.vocabulary.equal(odd.vocabulary) and draft.config.vocabulary_size == 200
        assert draft.lm_head.weight.equal(odd.lm_head.weight)
    for size in (100, 320):
        draft = SpecialistTraining(inner, [2, 2], **speed, vocabulary_size=size).draft
        common = FeatureStore(inner).common_tokens(size)
        assert draft.vocabulary is None if common is None else draft.vocabulary.equal(common)


def test_a_vocabulary_of_all_tokens_is_none(store):
    draft = SpecialistTraining(store, [2], vocabulary_size=320).draft
    assert draft.vocabulary is None and draft.config.vocabulary_size is None


def test_what_an_eagle_3_draft_lacks_is_named(store, inner):
    with pytest.raises(ValueError, match=r"tiny.* has 2$"):
        SpecialistTraining(store, [2, 2], **EAGLE3)
    with pytest.raises(ValueError, match=r"loss has feature: 1\.0, but a draft of this kind predicts no feature"):
        SpecialistTraining(inner, [2, 2], kind="eagle3", loss={"feature": 1.0})
    assert SpecialistTraining(inner, [2, 2], kind="eagle3").loss_weights == {"token": 1.0}
    with pytest.raises(StoreError, match=r"keeps no outputs of layer 5, .* extract it with --layers \[2,5,3\]"):
        FeatureStore(inner).select((2, 5, 3))


def test_samples_have_only_the_layers_that_are_read(inner):
    whole = FeatureStore(inner)
    outputs = dict(zip(whole.manifest.layers, whole[3].layers.unbind(1), strict=True))
    chosen = pickle.loads(pickle.dumps(whole.select((4, 2))))[3]  # as a loader's process gets it
    assert torch.equal(chosen.layers, torch.stack([outputs[4], outputs[2]], dim=1))
    assert torch.equal(chosen.draft_input, torch.cat([outputs[4], outputs[2]], dim=1))
    none = whole.select(())[3]
    assert none.layers.shape[1] == 0 and none.draft_input is none.features


def test_checkpoints_hold_nothing_frozen_and_resume(inner, tmp_path):
    options = EAGLE3 | {"vocabulary_size": 200}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    module, _ = fit(inner, tmp_path, steps=4, callbacks=[keep], **options)
    assert not any("embed_head" in name for name in module.state_dict())
    again, _ = fit(inner, tmp_path, steps=4, resume=tmp_path / "step=2.ckpt", **options)
    assert all(torch.equal(a, b) for a, b in zip(again.draft.parameters(), module.draft.parameters(), strict=True))


def test_a_batch_that_only_fills_up_a_step_is_not_logged(store, tmp_path):
    """At the end of an epoch, the logged loss is that of the last real batch."""
    logged = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            logged.append((any(batch.spans), float(trainer.callback_metrics["train/loss"])))

    data = FeatureData(store, batch_tokens=512, validation=0.2)
    trainer = lightning.Trainer(
        **CPU,
        max_epochs=1,
        accumulate_grad_batches=7,
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[Watch()],
        default_root_dir=tmp_path,
    )
    trainer.fit(SpecialistTraining(store, [2]), data)
    assert not logged[-1][0] and all(loss > 0 for _, loss in logged)
    assert logged[-1][1] == [loss for real, loss in logged if real][-1]


def test_a_depth_of_validation_beyond_the_window_is_refused_at_once(store):
    with pytest.raises(ValueError, match="depth is 6, and the draft's window 5"):
        SpecialistTraining(store, [2, 2, 2], depth=5, window=5)


def test_throughput_counts_all_batches_between_two_logs(store, tmp_path):
    module = SpecialistTraining(store, [2, 2])
    trainer = lightning.Trainer(
        **CPU | {"enable_progress_bar": True},
        max_steps=4,
        accumulate_grad_batches=2,
        log_every_n_steps=4,
        limit_val_batches=1,
        val_check_interval=3,
        enable_checkpointing=False,
        callbacks=[throughput := Throughput()],
        default_root_dir=tmp_path,
    )
    taken, plain = [], throughput._log
    throughput._log = lambda *given: (taken.append((throughput.totals.tolist(), throughput.started)), plain(*given))
    data = FeatureData(store, batch_tokens=256, validation=0.2)
    trainer.fit(module, data)
    ((slots, tokens, flops), _) = taken[0]
    shown = [i for epoch in range(2) for i in data.train]  # enough to hold what four steps took
    assert 0 < slots < tokens <= sum(data.source.lengths[i] for i in shown) and flops > 0
    logged = trainer.callback_metrics
    assert 0 < logged["throughput/waiting"] < 1 and logged["throughput/teraflops"] > 0
    assert logged["slots/s"] / logged["throughput/tokens_per_second"] == pytest.approx(slots / tokens, rel=1e-4)
    assert {"slots/s", "throughput/waiting"} <= set(trainer.progress_bar_metrics)


def test_the_schedule_rises_then_falls_to_nothing(store):
    module = SpecialistTraining(store, [2], learning_rate=1.0, warmup=0.1)
    module.trainer = type("Trainer", (), {"estimated_stepping_batches": 100, "max_steps": -1})()
    factor = module.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    values = [factor(step) for step in range(101)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[10] == 1 and values[100] == 0
    assert all(a > b for a, b in pairwise(values[10:]))


def test_a_validation_is_as_deep_as_decoding_be_it_a_single_pass(store):
    deep = SpecialistTraining(store, [6], depth=1)
    assert (deep.draft.config.depth, deep.eval_depth) == (1, 6)
    module = SpecialistTraining(store, [1])
    trainer = lightning.Trainer(**CPU)
    values = trainer.validate(module, FeatureData(store, batch_tokens=512, validation=0.2), verbose=False)[0]
    assert "val_drift_cosine/depth_1" in values and "val_drift_cosine/depth_2" not in values


@pytest.mark.nightly
def test_two_processes_train_one_draft(store, tiny_folder, tmp_path):
    """DDP over gloo from the command line: it ends, both take as many steps, and the draft is written once."""
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "max_steps": 4,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "callbacks": [
            {"class_path": "poss_lightning.evaluation.probe.Replay"},
            {"class_path": "poss_lightning.training.callbacks.DraftFolders"},
            {"class_path": "poss_lightning.training.dashboard.Dashboard"},
        ],
    }
    data = {"store": store, "batch_tokens": 256, "validation": 0.2}
    place = {"name": "run", "trainer.default_root_dir": str(tmp_path)}
    arguments = command_line({"data": data, "model": {"allocation": [2, 2]}, "trainer": trainer}, place)
    command = [Path(sys.executable).parent / "poss", "fit", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("draft-last", "draft-best"):
        assert Specialists.from_pretrained(tmp_path / "run" / name).config.allocation == (2, 2)
