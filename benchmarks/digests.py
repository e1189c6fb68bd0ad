"""`make digests`: digests of a fixed extraction, training, benchmark and replay.

A change that should change no result prints the same lines before and after it, on one machine with as many threads. In
float32, with the embedded target and the shipped drafts; takes some minutes.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from poss_lightning.draft.folder import WEIGHTS
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.replay import replay
from poss_lightning.evaluation.rounds import ANSWER_KEY, PLAIN, read_answers, read_rounds
from poss_lightning.extraction import extract
from poss_lightning.features.store import FeatureStore
from poss_lightning.shipped import CORPUS
from poss_lightning.training.fit import fit_once

MODEL = {"allocation": [2, 2, 2], "start_from": "embedded-hass", "vocabulary_size": 32768, "learning_rate": 5.0e-4}
DATA = {"batch_tokens": 512, "validation": 0.2, "noise": 0.1}
TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "precision": "32-true",
    "max_steps": 20,
    "val_check_interval": 10,
    "limit_val_batches": 2,
    "check_val_every_n_epoch": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def of_rounds(folder: str) -> str:
    """Digest of tokens and accepted lengths in any order of methods; plain decoding has its earlier name."""
    rounds = read_rounds(folder)
    rows = rounds.join(read_answers(rounds), on=ANSWER_KEY).replace({"method": {PLAIN: "autoregressive"}})
    facts = sorted(
        [r.suite, r.id, r.turn, r.method, r.repeat, r.tokens[: r.new_tokens].tolist(), r.accepted.tolist()]
        for r in rows.itertuples()
    )
    return digest([json.dumps(facts).encode()])


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        store = f"{out}/store"
        extract(str(CORPUS), store, limit=16, dtype="float32", device="cpu")
        samples = FeatureStore(store)
        rows = [samples[i] for i in range(len(samples))]
        features = digest(part.numpy().tobytes() for row in rows for part in (row.tokens, row.greedy, row.features))
        draft = fit_once(Path(out) / "fit", {"model": MODEL, "data": DATA | {"store": store}, "trainer": TRAINER})
        weights = load_file(draft / WEIGHTS)
        common: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
        drafts = {"hass": "embedded-hass", "fitted": str(draft)}
        sizes: dict[str, Any] = {"suites": ["code", "questions"], "limit": 1, "max_new_tokens": 32, "tree": "fixed"}
        benchmark(f"{out}/greedy", drafts=drafts, **sizes, **common)
        benchmark(f"{out}/drawn", drafts=drafts, temperature=0.8, seed=1, **sizes, **common)
        replay(store, f"{out}/replay", drafts=drafts, **common)
        found = {
            "features": features,
            "weights": digest(weights[name].numpy().tobytes() for name in sorted(weights)),
            "greedy": of_rounds(f"{out}/greedy"),
            "drawn": of_rounds(f"{out}/drawn"),
            "replay": of_rounds(f"{out}/replay"),
        }
    print("\n".join(f"{name:<10}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
