"""`make bench`: how far extraction is from the target's bare forward; prints a table, writes runs/bench/core.json."""

import json
import tempfile
from pathlib import Path

import torch
from measure import seconds

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.demo import CORPUS
from poss_lightning.evaluation.surroundings import surroundings
from poss_lightning.features import extract
from poss_lightning.files import atomic
from poss_lightning.target.generation import pad
from poss_lightning.target.model import Target


@torch.inference_mode()
def extraction(target: Target, conversations: int = 96, batch_tokens: int = 4096) -> dict[str, float]:
    """Tokens a second of `poss extract`, against forwards of the same batches that keep nothing.

    Extraction also finds the target's likeliest token after every answer slot, so it reads the LM head there.
    """
    read = read_conversations(str(CORPUS), limit=conversations)
    texts = extract.read_texts(target, read, 2048)
    batches = [
        pad([text.tokens for text in batch], target.device)
        for batch in extract.plan_shards(texts, batch_tokens, 10**9)[0]
    ]
    tokens = sum(len(text.tokens) for text in texts)

    def features_only() -> None:
        for batch in batches:
            target.read(batch)

    def with_logits() -> None:
        for batch in batches:
            target.model(batch, use_cache=False)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            extract.write_store(Path(folder) / "store", target, read, 2048, batch_tokens, 2**30)

    times = {"extract": whole, "forward": with_logits, "forward_without_head": features_only}
    rates = {name: tokens / seconds(work, 3) for name, work in times.items()}
    return {f"{name}_tokens_per_second": rate for name, rate in rates.items()} | {
        "extract_fraction_of_forward": rates["extract"] / rates["forward"],
        "extract_fraction_of_forward_without_head": rates["extract"] / rates["forward_without_head"],
    }


def main() -> None:
    target = Target.load("embedded")
    figures = extraction(target)
    for name, value in figures.items():
        print(f"  {name:<44} {value:10.4f}")
    with atomic("runs/bench/core.json") as path:
        path.write_text(json.dumps({**surroundings(target.device), "extraction": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
