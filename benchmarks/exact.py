"""`python -m benchmarks.exact`: tokens drawn in float32 by the engine and by plain decoding; how many texts differ?

Chains, and trees in every fourth batch, of the embedded target and a shipped draft. A killed count resumes after the
last whole batch.
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.decode import TREES
from benchmarks.measure import write
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.sampling import Sampling
from poss_lightning.target.model import Target

ROWS = 30  # prompts of a batch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="to count, over all texts")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", default="runs/bench/exact.json")
    options = parser.parse_args(arguments)
    target, draft = Target.load("embedded", "float32", "cpu"), Specialists.from_pretrained("embedded-hass")
    prompts = [question.first_prompt(target.chat) for question in read_suites()]
    plain = Autoregressive(target)
    chain, tree = (Speculative(target, draft, *TREES[name]) for name in list(TREES)[:2])
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "prompts": len(prompts)}
    found = settings | {"batches": 0, "tokens": 0, "texts": 0, "texts_that_differ": 0}
    if Path(options.out).is_file():
        earlier = json.loads(Path(options.out).read_text())
        found |= earlier if {name: earlier.get(name) for name in settings} == settings else {}
    with tqdm(total=options.tokens, initial=found["tokens"], desc="exact", unit="token") as bar:
        while bar.n < options.tokens:
            batch = found["batches"]
            rows = (prompts * 2)[batch * ROWS % len(prompts) :][:ROWS]
            texts = (
                decoder.decode(
                    rows,
                    options.max_new_tokens,
                    sampling=Sampling(options.temperature),
                    generator=torch.Generator().manual_seed(batch),
                )
                for decoder in (plain, tree if batch % 4 == 3 else chain)
            )
            pairs = [(own.tokens, other.tokens) for own, other in zip(*texts, strict=True)]
            bar.update(sum(len(own) for own, _ in pairs))
            differ = found["texts_that_differ"] + sum(own != other for own, other in pairs)
            found |= {"batches": batch + 1, "tokens": bar.n, "texts": found["texts"] + len(pairs)}
            bar.set_postfix(texts=found["texts"], differ=differ)
            write(options.out, found | {"texts_that_differ": differ}, "cpu")
            found["texts_that_differ"] = differ


if __name__ == "__main__":
    main()
