"""`make bench`: how far extraction is from the target's bare forward, and a round from its own parts.

Ratios of things timed in one process, in turn; prints a table and writes runs/bench/core.json.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.trees import ancestors
from poss_lightning.demo import CORPUS
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.evaluation.benchmark import surroundings
from poss_lightning.features import extract
from poss_lightning.files import atomic
from poss_lightning.target.generation import pad
from poss_lightning.target.model import Target


def seconds(work: Callable[[], object], times: int) -> float:
    """Median of some runs after one that is not counted."""
    work()
    runs = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        runs.append(time.perf_counter() - start)
    return median(runs)


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


@torch.inference_mode()
def rounds(
    target: Target, allocation: tuple[int, ...], new_tokens: int = 48, depth: int = 6, nodes: int = 60
) -> dict[str, float]:
    """Seconds of a whole round, and of its verify forward and its draft steps alone.

    The draft is random: what it says changes how many rounds there are, not how long one takes.
    """
    torch.manual_seed(0)
    engine = Speculative(target, Specialists(DraftConfig(target.spec, allocation, depth)), depth, nodes)
    prompt = target.chat.prompt([{"role": "user", "content": "Why is the sky blue, and the evening sky red?"}])
    engine.decode([prompt], 4, frozenset())
    decoded = engine.decode([prompt], new_tokens, frozenset())[0]
    spent = decoded.seconds["total"] - decoded.seconds["prefill"]

    drafter, cache = engine.drafter, engine.cache
    tree = drafter.grow()
    above = ancestors(tree.parents, depth)
    cache.slots.open(tree.tokens.shape[1])
    mask = cache.slots.visible(above)
    positions = cache.slots.length[:, None] + above.sum(-1) - 1

    def verify() -> None:
        hidden = target.model.base_model(
            input_ids=tree.tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        target.ends.logits(hidden)

    def steps() -> None:
        for k in range(1, depth + 1):
            rows = 1 if k == 1 else drafter.top_k
            z = drafter.root_z.expand(1, rows, -1)
            seen = torch.zeros(1, rows, drafter.top_k * depth, dtype=torch.bool)
            turn = drafter.draft.rotation(drafter.slots.length[:, None].expand(1, rows))
            drafter.ends.logits(drafter._step(k, z, turn, seen))

    parts = {"round": spent / len(decoded.accepted), "verify": seconds(verify, 15), "draft_steps": seconds(steps, 15)}
    alone = parts["verify"] + parts["draft_steps"]
    plain = Autoregressive(target).decode([prompt], 24, frozenset())[0].seconds["verify"] / 23
    return parts | {"round_over_parts": parts["round"] / alone, "plain_step": plain}


def main() -> None:
    target = Target.load("embedded")
    results = {"extraction": extraction(target)}
    for allocation in ((6,), (2, 2, 2), (1,) * 6):
        results[f"round {list(allocation)}"] = rounds(target, allocation)
    for part, figures in results.items():
        print(f"\n{part}")
        for name, value in figures.items():
            print(f"  {name:<44} {value:10.4f}")
    with atomic("runs/bench/core.json") as path:
        path.write_text(json.dumps({**surroundings(target.device), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
