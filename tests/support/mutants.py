"""Catch us cheating: faults put in on purpose, one by one, and the first test that fails of each. `make mutants`

Several are those of the published code (docs/METHOD.md, 8). Where no test sees one, it says so and exits with 1.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
        "loss: the slope of a term is not that of logits",
        "losses/passes.py",
        "slope.add_(found - log_q.exp() * found.sum(-1, keepdim=True))",
        "slope.add_(found)",
        "test_losses.py",
    ),
    Mutant(
        "loss: a chain's weights are of the next chain's slots",
        "losses/slot_weights.py",
        "[min(k, passes.shape[-1]) for k in range(len(passes))]",
        "[min(max(k - 1, 0), passes.shape[-1]) for k in range(len(passes))]",
        "test_losses.py",
    ),
    Mutant(
        "EAGLE-3.1: the next position reads the output before the norm",
        "draft/specialists.py",
        "return self.norm(predicted) if self.config.norm_output else predicted",
        "return predicted",
        "draft/test_unroll.py",
    ),
    Mutant(
        "graphs: a second text is drawn with the first one's seed",
        "sampling.py",
        "self.keys.copy_(text_keys(",
        "self.keys = (text_keys(",
        "decoding/test_pretended_decoding.py",
    ),
    Mutant(
        "sampling: one noise for all texts",
        "sampling.py",
        "keys = _mix(self.keys[:, :, None]",
        "keys = _mix(self.keys[:1, :, None]",
        "test_sampling.py decoding/test_engine.py",
    ),
    Mutant(
        "drafting: the noise is of the place before",
        "decoding/drafting.py",
        "noise[:, k - 1, None]",
        "noise[:, max(k - 2, 0), None]",
        "decoding/test_engine.py",
    ),
    Mutant(
        "drafting: the noise is of the draft's row, not of the token",
        "decoding/drafting.py",
        "noise = noise.gather(2, self.draft.vocabulary.expand(*noise.shape[:2], -1))",
        "noise = noise[..., : len(self.draft.vocabulary)]",
        "decoding/test_engine.py",
    ),
    Mutant(
        "drafting: the noise lacks the temperature that the target's has",
        "decoding/drafting.py",
        "        logits += noise\n",
        "        logits += noise.sign()\n",
        "decoding/test_engine.py draft/test_unroll.py",
    ),
    Mutant(
        "graphs: the two caches take their next slots at different times",
        "decoding/engine.py",
        "cache.slots.min_extent = drafter.slots.min_extent = behind",
        "cache.slots.min_extent = self.nodes",
        "decoding/test_pretended_decoding.py",
    ),
    Mutant(
        "drafting: queries of a group change places with nodes",
        "decoding/drafting.py",
        "attended.unflatten(2, (group, -1)).flatten(1, 2)",
        "attended.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)",
        "decoding/test_engine.py",
    ),
    Mutant(
        "CUDA: a tensor of a round is left on the host",
        "decoding/trees.py",
        "itself = torch.eye(nodes, dtype=torch.bool, device=parents.device)",
        "itself = torch.eye(nodes, dtype=torch.bool)",
        "decoding/test_pretended_decoding.py",
    ),
    Mutant(
        "CUDA: the host looks at a round that is captured",
        "decoding/verification.py",
        "    path = end[:, None]",
        "    accepted.tolist()\n    path = end[:, None]",
        "decoding/test_pretended_decoding.py",
    ),
    Mutant(
        "CUDA: a graph reads a mask that has been replaced",
        "decoding/active.py",
        "self.mask.copy_(torch.tensor([int(row in rows) for row in range(len(self.prompts))]))",
        "self.mask = torch.tensor([int(row in rows) for row in range(len(self.prompts))], device=self.mask.device)",
        "decoding/test_pretended_decoding.py",
    ),
    Mutant(
        "CUDA: the loss compares with numbers made on the host",
        "losses/passes.py",
        "counting] >= torch.arange(1, passes + 1, device=counts.device)[:, None]",
        "counting] >= torch.arange(1, passes + 1)[:, None]",
        "training/test_pretended_training.py",
    ),
    Mutant(
        "CUDA: rotary angles are made on the host",
        "draft/layer.py",
        "torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)",
        "torch.arange(0, head_dim, 2, dtype=torch.float32)",
        "training/test_pretended_training.py",
    ),
    Mutant(
        "CUDA: a step waits for every gradient",
        "training/guard.py",
        "bool(torch.stack([tensor.isfinite().all() for tensor in losses + local]).all())",
        "all([bool(tensor.isfinite().all()) for tensor in losses + local])",
        "training/test_pretended_training.py",
    ),
    Mutant(
        "CUDA: features are moved to the device twice",
        "features/datamodule.py",
        "if self.source.layers:",
        "if batch.draft_input is not batch.features:",
        "training/test_pretended_training.py",
    ),
    Mutant(
        "training: a query sees one slot too many of the context",
        "draft/attention.py",
        "slots[near:] > (own - self.skip).clamp(",
        "slots[near:] > (own - self.skip + 1).clamp(",
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
        "training on a GPU: the first slot of a row sees the row before",
        "draft/attention.py",
        "(first[t] <= s) & (s <= last[t])",
        "(first[t] - 1 <= s) & (s <= last[t])",
        "draft/test_flex.py",
    ),
    Mutant(
        "training on a GPU: attention is compiled anew for a row that is shorter than two blocks",
        "draft/attention.py",
        "max(-(-batch * count // BLOCK), 2) * BLOCK",
        "-(-batch * count // BLOCK) * BLOCK",
        "draft/test_flex.py",
    ),
    Mutant(
        "training: features are not moved to the right between passes",
        "draft/unroll.py",
        "torch.cat([features[:, :1], features[:, :-1]], dim=1)",
        "features",
        "draft/test_unroll.py",
    ),
    Mutant(
        "features: an engine's stand before the final norm",
        "serving/features.py",
        "self._norm(joined[:, -1])",
        "joined[:, -1]",
        "serving/test_features.py",
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
        "self.target.embed_head.logits(features)\n",
        "self.target.embed_head.logits(features, self.drafter.product)\n",
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
        "specialist = self.draft.config.specialist_at(position)",
        "specialist = 0",
        "draft/test_unroll.py decoding/test_engine.py",
    ),
    Mutant(
        "training: a window is a slot too wide",
        "draft/attention.py",
        "slots[: max(far, 0)] <= own - self.window",
        "slots[: max(far, 0)] < own - self.window",
        "draft/test_unroll.py",
    ),
    Mutant(
        "drafting: a window does not move with the position",
        "decoding/drafting.py",
        "else window - (position - 1))",
        "else window)",
        "draft/test_unroll.py",
    ),
    Mutant(
        "drafting: a node sees its siblings",
        "decoding/drafting.py",
        "mask = self.slots.tree_mask(frontier.ancestors,",
        "mask = self.slots.tree_mask(frontier.ancestors.any(1, True).expand_as(frontier.ancestors),",
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
        "decoding/engine.py",
        "verdict = judge(tree, ancestors, choice, depth)",
        "verdict = judge(tree, ancestors, choice.where(choice == choice[:, :1], logits.argmax(-1)), depth)",
        "decoding/test_engine.py",
    ),
    Mutant(
        "sampling: likely tokens are drawn a little too often",
        "sampling.py",
        "return negative.log1p_().neg_().log_()",
        "return negative.log1p_().neg_().log_().mul_(0.99)",
        "test_sampling.py",
    ),
    Mutant(
        "sampling: a nucleus lacks the token that reaches top_p",
        "sampling.py",
        "(above + total >= share)",
        "(above + total - mass >= share)",
        "test_sampling.py",
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
        "losses/passes.py",
        "counted = counts.flatten()[counting] >= torch.arange(1, passes + 1, device=counts.device)[:, None]",
        "counted = (counts.flatten()[counting] >= 1).expand(passes, -1)",
        "test_losses.py",
    ),
    Mutant(
        "loss: p is renormalised over its top ten",
        "losses/passes.py",
        "scatter_add_(-1, rows, w_topk * p_top)",
        "scatter_add_(-1, rows, w_topk * p_top / p_top.sum(-1, keepdim=True))",
        "test_losses.py",
    ),
    Mutant(
        "loss: a head of the draft's own learns from all passes alike",
        "losses/passes.py",
        "(pass_weights / largest)[:, None]",
        "torch.ones_like(pass_weights)[:, None]",
        "test_losses.py",
    ),
    Mutant(
        "EAGLE-3: the residual goes on from what is normed, whatever the config says",
        "draft/layer.py",
        "return self.hidden_norm(hidden) if self.norm_before_residual else hidden",
        "return self.hidden_norm(hidden)",
        "interop/test_eagle3.py",
    ),
    Mutant(
        "rope: Llama 3.1's mixed waves are all slowed",
        "draft/layer.py",
        ".clamp(0, 1)",
        ".floor().clamp(0, 1)",
        "interop/test_eagle3.py",
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
        "reports/statistics.py",
        "np.maximum(s - i, 0) + np.maximum(q - i, 0)",
        "np.maximum(s - i, 0)",
        "reports/test_statistics.py",
    ),
    Mutant(
        "statistics: p is not corrected for several comparisons",
        "reports/statistics.py",
        "def holm(p: Sequence[float]) -> list[float]:\n",
        "def holm(p: Sequence[float]) -> list[float]:\n    return p\n\n\ndef _holm(p):\n",
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
        'exact["o_proj"] = bias.double()',
        'exact["o_proj"] = 0 * bias.double()',
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
        "if one.tokens[:both] != other.tokens[:both] else",
        "if False else",
        "reports/test_summary.py",
    ),
    Mutant(
        "statistics: two prompts that happen to agree make a difference sure",
        "reports/statistics.py",
        "return 0.0 if mean.value == 0 else math.nan",
        "return 0.0",
        "reports/test_statistics.py",
    ),
    Mutant(
        "chat: a special token that a user spells out closes the turn",
        "target/spelling.py",
        "found[0][:1] + GUARD + found[0][1:]",
        "found[0]",
        "target/test_chat.py",
    ),
    Mutant(
        "chat: what a target wrote is rendered anew from its text",
        "target/chat.py",
        'if tokens := message.get("tokens"):',
        'if (tokens := message.get("tokens")) and False:',
        "target/test_chat.py",
    ),
    Mutant(
        "chat: the template's empty thought is in the loss",
        "target/chat.py",
        "return _Answer(prompt, tail[:lead], body[lead:] + end)",
        'return _Answer(prompt, "", body + end)',
        "target/test_chat.py",
    ),
    Mutant(
        "chat: an answer that history rewrites is lost",
        "target/chat.py",
        "remaining -= spans.keys()",
        "remaining.clear()",
        "target/test_chat.py",
    ),
    Mutant(
        "split: the same conversation under another id is on the other side",
        "features/store.py",
        "above[pair[1]] = pair[0]",
        "pass",
        "features/test_store.py",
    ),
    Mutant(
        "files: a command writes among the files of others",
        "files.py",
        "if any(Path(path).iterdir()) and",
        "if False and",
        "test_refusals.py",
    ),
    Mutant(
        "ranges: 0 is taken where it means nothing",
        "ranges.py",
        "(bool(self.zero) and number == 0)",
        "number == 0",
        "test_ranges.py",
    ),
    Mutant(
        "report: the fastest of many is called faster without Holm's correction",
        "reports/statistics.py",
        "zip(means.items(), holm(list(p.values())), strict=True)",
        "zip(means.items(), list(p.values()), strict=True)",
        "reports/test_statistics.py",
    ),
    Mutant(
        "sweep: a training starts from another's unfinished draft",
        "evaluation/cell.py",
        "if (training / OPTIONS).is_file()",
        "if False",
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
        "report: prompts without a round in a column make its interval narrow",
        "reports/lengths.py",
        "Jackknife(taus, sums[:, 0] > 0)",
        "Jackknife(taus, sums[:, 0] >= 0)",
        "reports/test_compare.py",
    ),
    Mutant(
        "engines: a round of three tokens counts as two",
        "evaluation/engines.py",
        "rounds = [int(accepted) for accepted in rounds]",
        "rounds = [min(int(accepted), 2) for accepted in rounds]",
        "evaluation/test_engines.py",
    ),
    Mutant(
        "loss: a tiny overlap is made of 1 - (1 - it)",
        "losses/terms.py",
        "return -torch.minimum(log_p, log_q).logsumexp(-1)",
        "return -(1 - (1 - torch.minimum(log_p, log_q).exp().sum(-1))).clamp(min=1e-12).log()",
        "test_losses.py",
    ),
    Mutant(
        "guard: a batch whose draft input is its features is saved as it is",
        "training/guard.py",
        "tensor.clone(memory_format=torch.contiguous_format)",
        "tensor",
        "training/test_guard.py",
    ),
    Mutant(
        "prefill: a row that ends in an earlier block forgets its last feature",
        "target/generation.py",
        "rows = (counts > 0).nonzero()[:, 0]",
        "rows = (counts >= 0).nonzero()[:, 0]",
        "target/test_target.py",
    ),
    Mutant(
        "convert: a published draft's sliding window is dropped",
        "interop/settings.py",
        "        window=_find_window(published),\n",
        "",
        "interop/test_speculators.py",
    ),
    Mutant(
        "resume: the rate of a training that its epochs end goes on as if steps were the same",
        "training/resume.py",
        "* steps / before)",
        ")",
        "training/test_resume.py",
    ),
    Mutant(
        "graphs: a warm-up that fails leaves its traces",
        "target/graphs.py",
        "                for tensor, value in zip(state, saved, strict=True):\n                    tensor.copy_(value)",
        "                pass",
        "decoding/test_graphs.py",
    ),
    Mutant(
        "generate: a config's temperature is dropped where the argument says that tokens are drawn",
        "decoding/model.py",
        'if not (fields | given).get("do_sample"):',
        'if not fields.get("do_sample"):',
        "decoding/test_api.py",
    ),
)


def failing(folder: Path, tests: Sequence[str]) -> list[str]:
    """Which of these tests fails first, in a copy of the repository; none where all pass."""
    command = [sys.executable, "-m", "pytest", "-qx", "--no-header", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in tests]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return [line.removeprefix("FAILED ").split(" - ")[0] for line in said.splitlines() if "FAILED" in line]


def main() -> int:
    """Try every fault in a copy of the repository; the number of those that nobody saw.

    First without a fault: a test that fails then would seem to see any.
    """
    unseen = 0
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "cells", "__pycache__"))
        everything = sorted({name for mutant in MUTANTS for name in mutant.tests.split()})
        if failed := failing(copy, everything):
            print(f"without a fault\n    {failed[0]}")
            return 1
        for mutant in MUTANTS:
            file = copy / "poss_lightning" / mutant.file
            whole = file.read_text()
            file.write_text(whole.replace(mutant.right, mutant.wrong))
            failed = failing(copy, mutant.tests.split())
            file.write_text(whole)
            unseen += not failed
            print(f"{mutant.fault}\n    {failed[0] if failed else 'NOBODY SAW IT'}", flush=True)
    return unseen


if __name__ == "__main__":
    sys.exit(bool(main()))
