"""What drafts gain that see the noise of a draw: the same drawn texts, replayed by both rules.

    python experiments/sampling/draws.py OUT --temperature 1.0     writes OUT/records.jsonl.gz and OUT/run.json
    python experiments/sampling/draws.py --table FOLDER …          prints the table of such folders

The target draws each text once, by plain decoding, and `poss replay` drafts along it: `chain`, `16` and `60` see the
noise of the text; `chain-blind` and so on are the published rule: the most likely tokens, whatever is drawn.
`--scales 1.5` adds `16-x1.5`, which scores nodes by `log_softmax((l + T g) / 1.5)`. `auto` is `tree: auto`, so that the
engine decodes the texts anew: where rounding of bfloat16 breaks ties, its text differs.
"""

import argparse
import gzip
import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm

from poss_lightning.corpus.draws import Draw
from poss_lightning.decoding import drafting
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Decoded
from poss_lightning.decoding.drafting import Drafter, top_log_probs
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import describe_draft, provenance
from poss_lightning.evaluation.records import Record, to_line
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.evaluation.suites import Question, read_suites
from poss_lightning.features.store import Sample
from poss_lightning.files import atomic
from poss_lightning.reports.statistics import Jackknife, compare_means, interval, leave_one_out, mean_over
from poss_lightning.sampling import Sampling
from poss_lightning.target.model import Target

TREES = {"chain": (6, 7, 1), "16": (6, 16, 4), "60": (6, 60, 10)}  # depth, nodes, tree width
BLIND, AUTO, ROWS = "-blind", "auto", 16


def scaled_log_probs(logits, count, noise=None, scale: float = 1.0):
    return top_log_probs((logits.float() + noise) / scale, count)


def blind_draft_tree(drafter: Drafter, budget, noise=None, own=Drafter.draft_tree):
    return own(drafter, budget)


@torch.inference_mode()
def drawn(target: Target, questions: list[Question], limit: int, sampling: Sampling, seed: int) -> list[Sample]:
    """The target's answers, as a store has them."""
    prompts = [target.chat.prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    decoder, samples = Autoregressive(target), []
    texts, seeds = [], []
    for begin in tqdm(range(0, len(prompts), ROWS), desc="draw"):
        generator = torch.Generator().manual_seed(seed * 1000 + begin)
        texts += [one.tokens for one in decoder.decode(prompts[begin : begin + ROWS], limit, None, sampling, generator)]
        seeds += decoder.loop.sampler.seeds or [0] * len(prompts[begin : begin + ROWS])
    for question, prompt, answer, own in zip(questions, prompts, texts, seeds, strict=True):
        tokens = torch.tensor(prompt + answer)
        features, spans = target.text_features(tokens[None])[0], [(len(prompt), len(tokens))]
        name, greedy = f"{question.suite}/{question.id}", torch.full_like(tokens, -1)
        samples.append(Sample(name, tokens, greedy, spans, features, draws=[Draw(sampling, own)]))
    return samples


def replayed(draft: Specialists, target: Target, samples: list[Sample], scales: list[float]):
    """Names of methods, and what every round of every sample accepts."""
    greedy = samples[0].draws[0].sampling.temperature == 0
    blind = [sample._replace(draws=()) for sample in samples]
    for name, (depth, nodes, width) in TREES.items():
        replay = partial(replay_rounds, draft, target.embed_head, depth=depth, nodes=nodes, tree_width=width)
        yield name, replay(samples)
        if greedy:
            continue
        yield name + BLIND, replay(blind)
        for scale in scales if width > 1 else ():
            with patch.object(drafting, "top_log_probs", partial(scaled_log_probs, scale=scale)):
                yield f"{name}-x{scale}", replay(samples)


def decoded(draft: Specialists, target: Target, samples: list[Sample], limit: int):
    """The same by `tree: auto`: seeing and blind text by text in turn, with the same costs."""
    engines = {AUTO: Speculative(target, draft, tree="auto"), AUTO + BLIND: Speculative(target, draft, tree="auto")}
    found, costs = {name: [] for name in engines}, {}
    for sample in tqdm(samples, desc=AUTO):
        start, (draw,) = sample.spans[0][0], sample.draws
        for name, engine in engines.items():
            engine.measured, seed = costs, partial(torch.full, (1,), draw.seed)
            rule = blind_draft_tree if name.endswith(BLIND) else Drafter.draft_tree
            with (
                patch.object(Drafter, "draft_tree", rule),
                patch("poss_lightning.sampling.text_seeds", lambda count, generator, seed=seed: seed()),
            ):
                (one,) = engine.decode([sample.tokens[:start].tolist()], limit, sampling=draw.sampling)
            found[name].append(one)
    return found, costs


def table(folders: list[Path]) -> None:
    """τ of all folders' texts by temperature, draft and tree, over rounds; and the ratio, paired by question."""
    counts = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))  # (temperature, draft, method): question: sums
    for folder in folders:
        config = json.loads((folder / "run.json").read_text())["config"]
        for line in gzip.decompress((folder / "records.jsonl.gz").read_bytes()).splitlines():
            record = json.loads(line)
            key = config["temperature"], config["draft"], record["method"]
            accepted = record["accepted"]
            counts[key][record["suite"], record["id"]] += len(accepted), len(accepted) + sum(accepted)
    print("| T | draft | tree | texts | τ, blind | τ | ratio | minimum detectable |\n|" + "---|" * 8)
    for (temperature, draft, method), own in sorted(counts.items()):
        theirs = counts.get((temperature, draft, method.split("-")[0] + BLIND))
        if method.endswith(BLIND):
            continue
        both = [_tau(sums, own) for sums in (own, theirs or own)]
        (ratio,) = compare_means({method: mean_over([both[0]], [both[1]], logs=True)}, logs=True).values()
        blind, seeing = (interval(mean_over([one])) for one in both[::-1])
        ends = (blind.text(), ratio.with_interval(".3f"), f"{ratio.detectable:.3f}") if theirs else ("", "", "")
        print(f"| {temperature} | {draft} | {method} | {len(own)} | {ends[0]} | {seeing.with_interval()} | "
              f"{ends[1]} | {ends[2]} |")  # fmt: skip


def _tau(sums: dict, questions: dict) -> Jackknife:
    rounds, tokens = np.array([sums[question] for question in questions]).T
    left = leave_one_out(len(rounds))
    return Jackknife((left @ tokens) / (left @ rounds), rounds > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--draft", default="embedded-hass")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--limit", type=int, help="questions of each suite")
    parser.add_argument("--auto", type=int, default=0, help="questions that `tree: auto` decodes")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scales", type=float, nargs="*", default=[], help="others than 1 that are tried")
    options = parser.parse_args()
    if options.table:
        return table(options.table)
    target, sampling = Target.load("embedded", device="cpu"), Sampling(options.temperature)
    draft = load_draft(options.draft).to(target.dtype).eval()
    questions = read_suites(None, options.limit)
    samples = drawn(target, questions, options.max_new_tokens, sampling, options.seed)
    found, costs = dict(tqdm(replayed(draft, target, samples, options.scales), desc="replay", unit="rule")), {}
    answers = {name: list(zip(samples, rounds, strict=True)) for name, rounds in found.items()}
    if options.auto:
        some = samples[:: max(1, len(samples) // options.auto)]
        ours, costs = decoded(draft, target, some, options.max_new_tokens)
        answers |= {name: list(zip(some, ours[name], strict=True)) for name in ours}
    records = []
    for name, pairs in answers.items():
        for sample, one in pairs:
            suite, _, question = sample.id.partition("/")
            (accepted,) = [one.accepted] if isinstance(one, Decoded) else one
            written = one.tokens if isinstance(one, Decoded) else sample.tokens[sample.spans[0][0] :].tolist()
            said = written[: 1 + sum(count + 1 for count in accepted)]
            facts = {"suite": suite, "id": question, "turn": 0, "method": name}
            facts |= dict.fromkeys(("repeat", "seed"), options.seed) | {
                "prompt_tokens": sample.spans[0][0],
                "new_tokens": len(said),
                "seconds": {},
            }
            # Token ids are left out: seed and machine give the same text again.
            records.append(Record(**facts, accepted=accepted, tokens=[0] * len(said), text=""))
    records.sort(key=lambda record: (record.suite, str(record.id)))
    shapes = {name: dict(zip(("depth", "nodes", "tree_width"), tree, strict=True)) for name, tree in TREES.items()}
    methods = {name: {**shapes.get(name.split("-")[0], {"tree": AUTO}), **describe_draft(draft)} for name in answers}
    config = {name: value for name, value in vars(options).items() if name not in ("out", "table")}
    config |= {"target": target.spec.name, "fingerprint": target.spec.fingerprint, "dtype": target.dtype_name}
    facts = {"command": sys.argv, "config": config, "methods": methods, **provenance(target.device)}
    facts |= {"costs": {AUTO: next(iter(costs.values()))._asdict()}} if costs else {}
    options.out.mkdir(parents=True, exist_ok=True)
    with atomic(options.out / "run.json") as path:
        path.write_text(json.dumps(facts) + "\n")
    with atomic(options.out / "records.jsonl.gz") as path:
        path.write_bytes(gzip.compress("".join(f"{to_line(record)}\n" for record in records).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
