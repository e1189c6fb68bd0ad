"""`make bench`: extraction beside the target's bare forward, and a head in 8 bits beside `linear`.

Prints a table, writes runs/bench/core.json.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear

from benchmarks.measure import once
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.decoding.int8_head import Int8Head, exact_levels
from poss_lightning.demo import CORPUS
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.features.writing import plan_shards, tokenize, write_store
from poss_lightning.files import atomic
from poss_lightning.target.generation import pad_right
from poss_lightning.target.model import Target
from poss_lightning.target.spec import Product


@torch.inference_mode()
def extraction(target: Target, conversations: int = 96, batch_tokens: int = 4096) -> dict[str, float]:
    """Tokens a second of `poss extract`, against forwards of the same batches that keep nothing.

    Extraction also finds the target's likeliest token after every answer slot, so it reads the LM head there.
    """
    read = read_conversations(str(CORPUS), limit=conversations)
    texts = tokenize(target, read, 2048)
    batches = [
        pad_right([text.tokens for text in batch], target.device)
        for batch in plan_shards(texts, batch_tokens, 10**9)[0]
    ]
    tokens = sum(len(text.tokens) for text in texts)

    def features_only() -> None:
        for batch in batches:
            target.text_features(batch)

    def with_logits() -> None:
        for batch in batches:
            target.model(batch, use_cache=False)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_store(
                Path(folder) / "store", target, read, max_length=2048, batch_tokens=batch_tokens, shard_bytes=2**30
            )

    ways = {"extract": whole, "forward": with_logits, "forward_without_head": features_only}
    took = [{name: once(work, target.device.type) for name, work in ways.items()} for _ in range(4)][
        1:
    ]  # the first warms
    rates = [{name: tokens / seconds for name, seconds in each.items()} for each in took]
    return {f"{name}_tokens_per_second": median(each[name] for each in rates) for name in ways} | {
        f"extract_fraction_of_{name}": median(each["extract"] / each[name] for each in rates) for name in [*ways][1:]
    }


@torch.inference_mode()
def heads(target: Target, times: int = 25) -> dict[str, float]:
    """How many times faster than `linear` a draft's head is read in 8 bits; {} where no CPU's sums are exact.

    By rows of features and vocabulary, with other weights in the caches.
    """
    others, found = torch.zeros(2**26), {}  # 256 MiB
    if (levels := exact_levels()) is None:
        return found
    for head in (target.embed_head.head[:32768], target.embed_head.head):
        int8 = Int8Head(head, levels)
        for rows in (2, 10, 24):
            features = torch.randn(rows, head.shape[1]).to(head.dtype)
            took: dict[Product, list[float]] = {linear: [], int8: []}
            for _ in range(times):
                for read, seconds_of in took.items():
                    others.add_(1)
                    seconds_of.append(once(partial(read, features, head)))
            found[f"linear_over_int8_{rows}_rows_of_{len(head)}"] = median(took[linear]) / median(took[int8])
    return found


def main() -> None:
    target = Target.load("embedded", device="cpu")
    print(f"{target.dtype_name} on {target.device}")
    figures = {"dtype": target.dtype_name, "extraction": extraction(target), "heads": heads(target)}
    for part in (figures["extraction"], figures["heads"]):
        for name, value in part.items():
            print(f"  {name:<44} {value:10.4f}")
    with atomic("runs/bench/core.json") as path:
        path.write_text(json.dumps({**provenance(target.device), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
