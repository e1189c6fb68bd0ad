"""Catch us cheating: faults put in on purpose, one by one, and the first test that fails of each. `make mutants`

Several are those of the published code (docs/METHOD.md, 8). Where no test sees one, it says so and exits with 1.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A fault: in `file` of the package `right` stands once, and `wrong` takes its place."""

    fault: str
    file: str
    right: str
    wrong: str
    tests: str  # where it should be seen


MUTANTS = (
    Mutant(
        "training: a query sees one slot too many of the context",
        "draft/attention.py",
        "device=keys.device).sub_(self.skip).clamp_",
        "device=keys.device).sub_(self.skip - 1).clamp_",
        "draft/test_unroll.py",
    ),
    Mutant(
        "training: keys before a conversation's start are not hidden",
        "draft/attention.py",
        "score.masked_fill((packing.positions < i)[:, None, None], -torch.inf)",
        "score",
        "draft/test_unroll.py",
    ),
    Mutant(
        "training: features are not moved to the right between passes",
        "draft/unroll.py",
        "torch.cat([features[:, :1], features[:, :-1]], dim=1)",
        "features",
        "draft/test_unroll.py",
    ),
    Mutant(
        "decoding: two rows of features change places where the head is on the left",
        "target/spec.py",
        "(head @ features.flatten(0, -2).t())",
        "(head @ features.flatten(0, -2).flip(0).t())",
        "target/test_target.py",
    ),
    Mutant(
        "decoding: in a head of 8 bits all rows of features have the scale of the largest",
        "decoding/int8_head.py",
        "logits.mul_(scale)",
        "logits.mul_(scale.amax())",
        "decoding/test_int8_head.py",
    ),
    Mutant(
        "decoding: the target judges by a head in 8 bits too",
        "decoding/engine.py",
        "self.target.embed_head.logits(features.flatten(0, 1))",
        "self.target.embed_head.logits(features.flatten(0, 1), self.drafter.product)",
        "decoding/test_int8_head.py",
    ),
    Mutant(
        "replay: what is left after finished answers is counted as the first ones'",
        "evaluation/replay.py",
        "rows = [rows[i] for i in kept]",
        "rows = rows[: len(kept)]",
        "evaluation/test_replay.py",
    ),
    Mutant(
        "replay: an answer cut short counts its last rounds too",
        "evaluation/replay.py",
        "counted = active & (complete | (root + depth < lengths))",
        "counted = active",
        "evaluation/test_replay.py",
    ),
    Mutant(
        "the wrong specialist serves: positions counted from 0",
        "draft/config.py",
        "self.specialists[min(position, len(self.specialists)) - 1]",
        "self.specialists[min(position, len(self.specialists) - 1)]",
        "draft/test_draft.py",
    ),
    Mutant(
        "drafting: the first specialist runs at every position",
        "decoding/drafting.py",
        "layer, z = self.draft.specialist_at(position), frontier.z",
        "layer, z = self.draft.specialist_at(1), frontier.z",
        "draft/test_unroll.py decoding/test_engine.py",
    ),
    Mutant(
        "drafting: a node sees its siblings",
        "decoding/drafting.py",
        "attn_mask=self.slots.tree_mask(frontier.ancestors),",
        "attn_mask=self.slots.tree_mask(frontier.ancestors.any(1, True).expand_as(frontier.ancestors)),",
        "draft/test_unroll.py decoding/test_engine.py",
    ),
    Mutant(
        "verification: a node does not see its parent",
        "decoding/trees.py",
        "for _ in range(depth):\n        ancestors = itself",
        "for _ in range(depth - 1):\n        ancestors = itself",
        "decoding/test_trees.py decoding/test_engine.py",
    ),
    Mutant(
        "verification: the bonus token is drawn without temperature",
        "decoding/verification.py",
        "choice = sample(logits[logit_rows[rows, node]], position + accepted)",
        "p = logits[logit_rows[rows, node]]\n"
        "        choice = sample(p, position + accepted) if _ < depth else p.argmax(-1)",
        "decoding/test_verification.py",
    ),
    Mutant(
        "sampling: the draft's favourite is accepted a little too often",
        "sampling.py",
        "torch.searchsorted(cdf, (uniform * cdf[..., -1])[..., None], right=True)",
        "torch.searchsorted(cdf, (0.97 * uniform * cdf[..., -1])[..., None], right=True)",
        "test_sampling.py decoding/test_verification.py",
    ),
    Mutant(
        "engine: the cache keeps the first nodes, not the accepted ones",
        "target/cache.py",
        "self.slots.flat_index(path), self.slots.flat_index(destination)",
        "self.slots.flat_index(destination.expand_as(path)), self.slots.flat_index(destination)",
        "target/test_target.py decoding/test_engine.py",
    ),
    Mutant(
        "engine: tokens after a stop are counted",
        "target/generation.py",
        "until = until_stop(emitted, self.stops)",
        "until = emitted",
        "decoding/test_engine.py",
    ),
    Mutant(
        "engine: a bonus that nobody emits is counted behind a drafted stop token",
        "target/generation.py",
        "return kept, len(until) - 1",
        "return kept, min(len(until), len(emitted) - 1)",
        "decoding/test_engine.py",
    ),
    Mutant(
        "replay: a bonus that nobody emits is counted behind an answer's end",
        "evaluation/replay.py",
        "verdict.accepted.minimum(lengths - 1 - complete.long() - root)",
        "verdict.accepted",
        "evaluation/test_replay.py",
    ),
    Mutant(
        "loss: a pass counts where its text is not the assistant's",
        "losses.py",
        "counted = counts[anywhere] >= passes[:, None]",
        "counted = (counts[anywhere] >= 1).expand(len(passes), -1)",
        "test_losses.py",
    ),
    Mutant(
        "loss: p is renormalised over its top ten",
        "losses.py",
        "scatter_add_(-1, rows, w_topk * p_top)",
        "scatter_add_(-1, rows, w_topk * p_top / p_top.sum(-1, keepdim=True))",
        "test_losses.py",
    ),
    Mutant(
        "loss: a head of the draft's own learns from all passes alike",
        "losses.py",
        "(pass_weights / largest)[:, None]",
        "torch.ones_like(pass_weights)[:, None]",
        "test_losses.py",
    ),
    Mutant(
        "EAGLE-3: the residual goes on from what is normed",
        "draft/layer.py",
        "return z.chunk(2, dim=-1)[1]",
        "return self.read(z).chunk(2, dim=-1)[1]",
        "draft/test_unroll.py",
    ),
    Mutant(
        "EAGLE-3: the drafter's keys are made without their specialist's norms",
        "draft/layer.py",
        "return super().kv_weight() * self._norm_weights()",
        "return super().kv_weight()",
        "draft/test_unroll.py",
    ),
    Mutant(
        "EAGLE-3: the head is taught where it lacks the target's token",
        "training/module.py",
        "counts = counts * self.embed_head.has_row(batch.greedy[:, 1:])",
        "counts = counts * 1",
        "training/test_training.py",
    ),
    Mutant(
        "EAGLE-3: the engine reads each layer one too early",
        "target/model.py",
        "torch.cat(self._inner(output, layers)",
        "torch.cat(self._inner(output, [i - 1 for i in layers])",
        "target/test_target.py evaluation/test_replay.py",
    ),
    Mutant(
        "accumulation: the mean is over one batch's slots, not the step's",
        "features/schedule.py",
        "return (self.answers[:, None] - torch",
        "return (self.answers[: len(self.answers) // 2 + 1, None] - torch",
        "features/test_stream.py training/test_training.py",
    ),
    Mutant(
        "statistics: only trainings are random, prompts are not",
        "reports/seeds.py",
        "np.maximum(s - i, 0) + np.maximum(q - i, 0)",
        "np.maximum(s - i, 0)",
        "reports/test_seeds.py",
    ),
    Mutant(
        "statistics: p is not corrected for several comparisons",
        "reports/statistics.py",
        "def holm(p: list[float]) -> list[float]:\n",
        "def holm(p: list[float]) -> list[float]:\n    return p\n\n\ndef _holm(p):\n",
        "reports/test_statistics.py",
    ),
    Mutant(
        "statistics: tokens after the limit shorten the last round's acceptance",
        "target/generation.py",
        "return kept, len(until)",
        "return kept, len(kept)",
        "decoding/test_engine.py",
    ),
    Mutant(
        "interop: fc's bias, moved to attention, is not in the residual",
        "interop/tensors.py",
        'biases["o_proj"] = bias',
        'biases["o_proj"] = 0 * bias',
        "interop/test_layouts.py",
    ),
    Mutant(
        "interop: gate and up change places",
        "interop/layouts.py",
        '"mlp.gate_proj",\n    "up_proj": "mlp.up_proj"',
        '"mlp.up_proj",\n    "up_proj": "mlp.gate_proj"',
        "interop/test_layouts.py",
    ),
    Mutant(
        "interop: EAGLE-3's two norms change places",
        "interop/layouts.py",
        '"input_layernorm", "hidden_norm": "hidden_norm"',
        '"hidden_norm", "hidden_norm": "input_layernorm"',
        "interop/test_eagle3.py",
    ),
    Mutant(
        "interop: d2t holds ids and not offsets",
        "interop/tensors.py",
        "TO_TARGET: ids - torch.arange(len(ids))",
        "TO_TARGET: ids",
        "interop/test_eagle3.py",
    ),
    Mutant(
        "statistics: replays of different answers are compared",
        "reports/summary.py",
        "elif answer.tokens[:both] != record.tokens[:both]:",
        "elif False:",
        "reports/test_statistics.py",
    ),
    Mutant(
        "statistics: two prompts that happen to agree make a difference sure",
        "reports/statistics.py",
        "return math.nan if error == 0 and value != 0 else error",
        "return error",
        "reports/test_statistics.py",
    ),
    Mutant(
        "report: the fastest of many is called faster without Holm's correction",
        "reports/findings.py",
        "significant = gain.holm < LEVEL",
        "significant = gain.p < LEVEL",
        "reports/test_report.py",
    ),
    Mutant(
        "sweep: a training starts from another's unfinished draft",
        "sweep.py",
        'startswith("# after ")',
        'startswith("never")',
        "test_sweep.py",
    ),
    Mutant(
        "benchmark: seconds of two machines go into one file",
        "evaluation/benchmark.py",
        "if earlier.get(fact, facts[fact]) != facts[fact]:",
        "if False:",
        "evaluation/test_benchmark.py",
    ),
    Mutant(
        "tensor parallelism: the other ranks keep what a round wrote where it was written",
        "target/followers.py",
        'self.leader.call("change", self.number, "move", source, destination)',
        "self.leader.part.change(self.number, 'move', source, destination)",
        "target/test_parallel.py",
    ),
    Mutant(
        "tensor parallelism: ranks that train take the features of rank 0's batch",
        "features/online.py",
        "made = outputs if rank == own else made",
        "made = outputs if rank == 0 else made",
        "target/test_parallel.py",
    ),
)


def main() -> int:
    """Try every fault in a copy of the repository; the number of those that nobody saw."""
    unseen = 0
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "cells", "__pycache__"))
        for mutant in MUTANTS:
            file = copy / "poss_lightning" / mutant.file
            whole = file.read_text()
            file.write_text(whole.replace(mutant.right, mutant.wrong))
            tests = [f"tests/{name}" for name in mutant.tests.split()]
            command = [sys.executable, "-m", "pytest", "-qx", "--no-header", "-p", "no:cacheprovider", *tests]
            said = subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout
            file.write_text(whole)
            failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in said.splitlines() if "FAILED" in line]
            unseen += not failed
            print(f"{mutant.fault}\n    {failed[0] if failed else 'NOBODY SAW IT'}", flush=True)
    return unseen


if __name__ == "__main__":
    sys.exit(bool(main()))
