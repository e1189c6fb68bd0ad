"""`make bench-features`: how fast features are written, how large they are, and how long training waits for them.

On the embedded target, with the shipped corpus. Prints a table, writes runs/bench/features.json.
"""

import json
import os
import tempfile
import warnings
from pathlib import Path

import lightning
import torch

from benchmarks.core import extraction
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.demo import CORPUS
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.extract import write_store
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import atomic
from poss_lightning.machine import choose_precision
from poss_lightning.target.model import Target
from poss_lightning.training.callbacks import Throughput
from poss_lightning.training.module import SpecialistTraining


def bytes_per_token(store: Path) -> float:
    manifest = FeatureStore(store).manifest
    return sum(note.bytes for note in manifest.shards) / manifest.tokens


def forget(store: Path) -> None:
    """Ask the system to drop the files from its cache, so that they come from disk."""
    os.sync()
    for path in store.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def training(store: Path, packed: bool = True, steps: int = 12) -> dict[str, float]:
    """What `Throughput` logs of a real fit: PosS-3, depth 6, 2048 tokens a batch, the whole vocabulary."""
    lightning.seed_everything(0, verbose=False)
    data = FeatureData(str(store), batch_tokens=2048, packed=packed)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=choose_precision("cpu"),
        max_steps=steps,
        log_every_n_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Throughput()],
    )
    trainer.fit(SpecialistTraining(data.source, [3, 3]), data)
    return {name.removeprefix("throughput/"): float(value) for name, value in trainer.callback_metrics.items()}


def main() -> None:
    warnings.filterwarnings("ignore")
    target = Target.load("embedded", device="cpu")
    conversations = read_conversations(str(CORPUS), limit=256)
    width = target.spec.hidden_size
    with tempfile.TemporaryDirectory() as folder:
        exact, small = Path(folder) / "exact", Path(folder) / "float8"
        write_store(exact, target, conversations, max_length=2048, batch_tokens=4096, shard_bytes=2**30)
        write_store(
            small, target, conversations, max_length=2048, batch_tokens=4096, shard_bytes=2**30, stored="float8"
        )
        forget(exact)
        cold, warm, padded = training(exact), training(exact), training(exact, packed=False)
        results = {
            "wait_fraction": cold["waiting"],
            "wait_fraction_warm": warm["waiting"],
            "slots_per_second_packed": warm["slots/s"],
            "slots_per_second_padded": padded["slots/s"],
            "tokens_per_second_packed": warm["tokens_per_second"],
            "tokens_per_second_padded": padded["tokens_per_second"],
            "teraflops": warm["teraflops"],
            "width": width,
            "bytes_per_token": bytes_per_token(exact),
            "dtype": target.dtype_name,
            "bytes_per_token_bar": target.dtype.itemsize * width + 16,
            "bytes_per_token_8bit": bytes_per_token(small),
            "bytes_per_token_8bit_bar": width + 24,
        }
    results |= extraction(target)
    for name, value in results.items():
        print(f"  {name:<44} {value if isinstance(value, str) else format(value, '12.5g')}")
    with atomic("runs/bench/features.json") as path:
        path.write_text(json.dumps({**provenance(torch.device("cpu")), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
