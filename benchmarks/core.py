"""`make bench`: extraction beside the target's bare forward.

Prints figures and writes runs/bench/core.json.
"""

import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.measure import in_turn, ratios, report
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.features.writing import plan_shards, tokenize, write_store
from poss_lightning.shipped import CORPUS
from poss_lightning.target_model.generation import pad_right
from poss_lightning.target_model.model import Target


@torch.inference_mode()
def extraction(target: Target, conversations: int = 96, batch_tokens: int = 4096) -> dict[str, float]:
    """Tokens per second of `poss extract`, and of forwards of the same batches that keep nothing.

    Extraction also finds the target's most likely token after every answer slot, so it reads the LM head there.
    """
    read = read_conversations(str(CORPUS), limit=conversations)
    texts = tokenize(target, read, 2048)
    batches = [
        pad_right([text.tokens for text in batch], target.device)
        for batch in plan_shards(texts, batch_tokens, 10**9)[0]
    ]
    tokens = sum(len(text.tokens) for text in texts)

    def extract() -> None:
        sizes = {"max_length": 2048, "batch_tokens": batch_tokens, "shard_bytes": 2**30}
        with tempfile.TemporaryDirectory() as folder:
            write_store(Path(folder) / "store", target, read, **sizes)

    def forward() -> None:
        for batch in batches:
            target.model(batch, use_cache=False)

    def forward_without_head() -> None:
        for batch in batches:
            target.text_features(batch)

    works = {work.__name__: work for work in (extract, forward, forward_without_head)}
    times = in_turn(works, 3, target.device.type)
    rates = {f"{name}_tokens_per_second": tokens / median(seconds) for name, seconds in times.items()}
    return rates | {
        f"extract_fraction_of_{name}": median(ratios(times, name, "extract"))
        for name in ("forward", "forward_without_head")
    }


def main() -> None:
    target = Target.load("embedded", device="cpu")
    figures = {"dtype": target.dtype_name, "extraction": extraction(target)}
    report(figures, "runs/bench/core.json", target.device)


if __name__ == "__main__":
    main()
