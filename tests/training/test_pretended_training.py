"""Training on a pretended device: nothing is mixed with the host, steps equal the host's, and waits are counted.

So do extraction and online features, which make what a step reads. Attention is FlexAttention's, by its definition.
"""

from collections import Counter
from itertools import chain

import lightning
import pytest
import torch
from lightning.pytorch.accelerators.cpu import CPUAccelerator
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import move_data_to_device
from torch.nn.attention.flex_attention import AuxOutput
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.evaluation import stored_rounds
from poss_lightning.evaluation.probe import Replay
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.online import OnlineFeatures
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.features.writing import tokenize
from poss_lightning.target_model.model import Target
from poss_lightning.training.callbacks import StepBar, Throughput
from poss_lightning.training.dashboard import Dashboard
from poss_lightning.training.module import DraftModule
from tests.support.pretended import PretendedDevice
from tests.support.pretended_calls import DEVICE
from tests.support.steps import difference
from tests.support.talks import BLOCK, EAGLE3, talks
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.tolerance import LAYER, close, tolerance, tolerance_of_adamw
from tests.support.training import train

LAYERS = {"eagle2": (), "eagle3": (2, 3, 4), "block": (2, 3, 4)}
OPTIONS = {"eagle2": {}, "eagle3": EAGLE3, "block": BLOCK | {"allocation": [3]}}
MODEL = {"allocation": [2, 1], "learning_rate": 1e-3, "warmup": 0.0, "vocabulary_size": 200}
pytestmark = pytest.mark.nightly
PASSES, STEPS = 3, 4
MUON = tolerance(sums=15 * STEPS, dtype=torch.bfloat16)  # a step orthogonalises by 15 products in bfloat16
ADAMW = tolerance_of_adamw(sums=3 * PASSES * LAYER)  # forward and backward
DPACE = {"slot_weights": "dpace", "loss": {"token": 1.0, "acceptance": 0.1}}


def dense_attention(queries, keys, values, *, block_mask, return_lse=False, **options) -> tuple:
    """FlexAttention by its definition: the mask is called for every query and key."""
    keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    batch, _, count, width = queries.shape
    b, t, s = (torch.arange(size, device=queries.device) for size in (batch, count, keys.shape[2]))
    visible = block_mask.mask_mod(b[:, None, None, None], 0, t[:, None], s)
    scores = (queries @ keys.mT * width**-0.5).float().masked_fill(~visible, -torch.inf)
    out, norm = scores.softmax(-1).to(values.dtype) @ values, scores.logsumexp(-1)
    return out, norm if return_lse else AuxOutput(lse=norm)


class PinnedLoader(DataLoader):
    """As for CUDA."""

    def __iter__(self):
        return map(pin_memory, super().__iter__())


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr("poss_lightning.features.schedule.DataLoader", PinnedLoader)
    monkeypatch.setattr("poss_lightning.draft.attention.flex_attention", dense_attention)
    for place in ("draft.attention", "losses.chunks"):
        monkeypatch.setattr(f"poss_lightning.{place}.compiled", lambda function: function)
    with PretendedDevice() as device:
        yield device


def load(where: torch.device | str, kind: str) -> Target:
    model = tiny_model(num_hidden_layers=7 if LAYERS[kind] else 2)
    return Target(model.to(where).requires_grad_(False), tiny_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def stores(make_store) -> dict[str, str]:
    """Of each kind of draft, as the host writes them."""
    return {kind: make_store(load("cpu", kind), layers=layers) for kind, layers in LAYERS.items()}


class Accelerator(CPUAccelerator):
    """Makes Lightning accept a device that it does not know."""

    def setup_device(self, device: torch.device) -> None:
        pass


@pytest.fixture
def fit(stores, tmp_path):
    def run(kind: str, where: PretendedDevice | None, plugins=None, steps: int = STEPS, **changes):
        """Steps of two batches each on a device, or on the host; weights before and after, losses, waits of batches."""
        lightning.seed_everything(0, verbose=False)
        module = DraftModule(store=stores[kind], **MODEL | OPTIONS[kind] | changes)
        start = {name: value.clone() for name, value in module.draft.state_dict().items()}
        waits: list[list[str]] = []  # from the start of a batch to that of the next

        def begin(*_) -> None:
            waits.append([])
            if where:
                where.waits = waits[-1]

        watch = LambdaCallback(on_train_batch_start=begin)
        trainer = train(
            module,
            FeatureDataModule(stores[kind], batch_tokens=128, validation=0.2, noise=0.0),
            max_steps=steps,
            accelerator="auto",
            strategy=SingleDeviceStrategy(DEVICE if where else torch.device("cpu"), Accelerator()),
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            log_every_n_steps=3,
            val_check_interval=min(6, 2 * steps),
            limit_val_batches=1,
            callbacks=[Replay(answers=1), Throughput(), StepBar(), Dashboard(), watch],
            plugins=plugins,
            logger=TensorBoardLogger(tmp_path, version="host" if where is None else "device"),
            enable_progress_bar=True,
        )
        return start, module.draft.state_dict(), trainer.callback_metrics, waits

    return run


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle2", {"optimizer": "muon"}),
        ("eagle3", {"kv": "shared"}),
        ("block", {"anchors": 3}),
        ("block", {}),
        *((kind, DPACE) for kind in LAYERS),
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_replays")
def test_steps_are_the_hosts_and_wait_for_nothing_until_they_are_logged(device, fit, kind, options):
    """Through Lightning: loading, transfer, losses, clipping, the optimizer, bar and logger, validation."""
    start, host, host_metrics, _ = fit(kind, None, **options)
    _, ours, metrics, batches = fit(kind, device, **options)
    near = MUON if options.get("optimizer") == "muon" else ADAMW
    assert difference(ours, host, start) < near
    loss, host_loss = (float(each["val/loss"]) for each in (metrics, host_metrics))
    assert abs(loss - host_loss) < near * host_loss
    assert len(batches) == 8 and batches[5]  # the third step, after which there is a validation
    assert Counter(chain(*batches[1:4], batches[6])) == {}


@pytest.mark.usefixtures("short_replays")
def test_autocast_of_cuda_takes_all_dtypes(device, fit):
    """It rounds other operations than the CPU's: no product mixes dtypes, and the loss is nearly the same."""
    *_, exact, _ = fit("eagle3", None, steps=1)
    *_, mixed, _ = fit("eagle3", device, plugins=[MixedPrecision("bf16-mixed", "pretend")], steps=1)
    assert close(mixed["val/loss"], exact["val/loss"], sums=PASSES * LAYER, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_batch_is_pinned_and_moved_once_and_without_a_wait(device, stores, kind):
    data = FeatureDataModule(stores[kind], batch_tokens=256)
    data.source = data.source.select(LAYERS[kind])
    pinned = next(iter(data.train_dataloader()))
    device.waits.clear()
    moved = data.transfer_batch_to_device(pinned, DEVICE, 0)
    for batch in (pinned, moved):
        assert (batch.draft_input is batch.features) == (kind == "eagle2")
    assert not device.waits


def test_a_replay_waits_once_a_round(device, stores, monkeypatch):
    module = DraftModule([2], stores["eagle2"])
    samples, rounds = [FeatureStore(stores["eagle2"])[i] for i in range(6)], []
    monkeypatch.setattr(
        stored_rounds, "judge", lambda *given, judge=stored_rounds.judge: (rounds.append(1), judge(*given))[1]
    )
    host = stored_rounds.replay_rounds(module.draft, module.embed_head, samples, TreePlan(2))
    rounds.clear()
    device.waits.clear()
    samples = move_data_to_device(samples, DEVICE)
    assert (
        stored_rounds.replay_rounds(module.draft.to(DEVICE), module.embed_head.to(DEVICE), samples, TreePlan(2)) == host
    )
    assert len(rounds) > 10 and sum("stored_rounds.py" in wait for wait in device.waits) < 1.5 * len(rounds)


@pytest.mark.parametrize(("kind", "stored"), [("eagle2", "exact"), ("eagle3", "float8")])
def test_a_store_holds_the_hosts_features(device, make_store, kind, stored):
    """Extraction: the forward is done on the device, and what is kept comes from there."""
    options = {"layers": LAYERS[kind], "stored": stored}
    host, ours = (FeatureStore(make_store(load(where, kind), **options)) for where in ("cpu", DEVICE))
    rounding = {"exact": {"sums": 7 * LAYER}, "float8": {"dtype": torch.float8_e4m3fn}}[stored]
    for one, other in zip(host, ours, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.greedy.tolist() == other.greedy.tolist()
        assert close(other.features, one.features, **rounding) and close(other.layers, one.layers, **rounding)


def test_online_features_are_the_hosts(device):
    target = load("cpu", "eagle3")  # it follows the batches
    online = OnlineFeatures(target, tokenize(target, talks(), 128)).select(LAYERS["eagle3"])
    found = []
    for where in ("cpu", DEVICE):
        rows = [[online[0], online[20]], [online[39]]]  # packed, with padding
        batch = move_data_to_device(collate(rows), torch.device(where))
        online.fill(batch)  # moves the target
        device.waits.clear()
        filled = online.fill(batch)
        assert all("_base_forward" in wait for wait in device.waits)  # transformers asks whether texts are packed
        found.append([x.cpu() for x in (filled.features, filled.draft_input, filled.target_argmax)])
    for host, ours in zip(*found, strict=True):
        assert close(ours, host, sums=7 * LAYER)
