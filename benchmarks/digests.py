"""`make digests`: what a fixed extraction, training, benchmark and replay come to, as digests.

A change of the code that should change no result prints the same lines before and after, on one machine with as many
threads. In float32, with the embedded target and drafts of the package; some minutes.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load_file

from poss_lightning import cli
from poss_lightning.demo import CORPUS
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.records import Record, read_records
from poss_lightning.evaluation.replay import replay
from poss_lightning.features.extract import extract
from poss_lightning.features.store import FeatureStore

FIT = """
model: {allocation: [2, 2, 2], start_from: embedded-hass, vocabulary_size: 32768, learning_rate: 5.0e-4}
data: {batch_tokens: 512, validation: 0.2, noise: 0.1}
trainer:
  {accelerator: cpu, devices: 1, precision: 32-true, max_steps: 20, val_check_interval: 10, limit_val_batches: 2,
   check_val_every_n_epoch: null, enable_progress_bar: false, enable_model_summary: false,
   logger: {class_path: TensorBoardLogger, init_args: {save_dir: OUT, name: fit, version: ""}}}
"""


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def of_records(records: Iterable[Record]) -> str:
    """Of tokens and accepted lengths, whatever the order of methods."""
    facts = sorted([r.suite, str(r.id), r.turn, r.method, r.repeat, r.tokens, r.accepted] for r in records)
    return digest([json.dumps(facts).encode()])


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        store, settings = f"{out}/store", Path(out) / "fit.yaml"
        extract(str(CORPUS), store, limit=16, dtype="float32", device="cpu")
        samples = FeatureStore(store)
        rows = [samples[i] for i in range(len(samples))]
        features = digest(part.numpy().tobytes() for row in rows for part in (row.tokens, row.greedy, row.features))
        settings.write_text(FIT.replace("OUT", out))
        cli.run("fit", ["--config", str(settings), "--data.store", store])
        weights = load_file(f"{out}/fit/draft-last/model.safetensors")
        common = {"dtype": "float32", "device": "cpu"}
        drafts = {"hass": "embedded-hass", "fitted": f"{out}/fit/draft-last"}
        sizes = {"suites": ["code", "questions"], "limit": 1, "new_tokens": 32}
        benchmark(f"{out}/greedy", drafts, **sizes, **common)
        benchmark(f"{out}/drawn", drafts, temperature=0.8, seed=1, **sizes, **common)
        replay(f"{out}/replay", store, drafts, **common)
        found = {
            "features": features,
            "weights": digest(weights[name].numpy().tobytes() for name in sorted(weights)),
            "greedy": of_records(read_records(f"{out}/greedy")),
            "drawn": of_records(read_records(f"{out}/drawn")),
            "replay": of_records(read_records(f"{out}/replay")),
        }
    print("\n".join(f"{name:<10}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
