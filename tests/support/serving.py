"""vLLM and our engine over the same prompts, round by round; and tiny drafts that their target accepts."""

import gc
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.decoder import Progress
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.model import Target
from tests.support.decoders import speculate

SETTINGS = {  # of vLLM, where the user set none
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process, to be watched
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(SETTINGS | os.environ)
EXACT = {"dtype": "float32", "enforce_eager": True}
IN_ORDER = {"max_num_seqs": 8, "enable_prefix_caching": False, "async_scheduling": False, "disable_log_stats": False}


@dataclass
class Answer:
    """What one prompt got: all new tokens, and every round as (new tokens before it, drafted tokens).

    So rounds that are equal accepted the same numbers of tokens.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[int, list[int]]] = field(default_factory=list)

    def note(self, step: Progress) -> None:
        if step.tree is not None:
            self.rounds.append((len(self.tokens), step.tree.tokens[0, 1:].tolist()))
        self.tokens += step.tokens[0]

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens that were accepted, round by round."""
        ends = [before for before, _ in self.rounds[1:]] + [len(self.tokens)]
        return [end - before - 1 for (before, _), end in zip(self.rounds, ends, strict=True)]


def draft_here(target: Target, draft: DraftModel, prompts: list[list[int]], limit: int, depth: int) -> list[Answer]:
    """Our engine's answers, on chains, one prompt at a time."""
    engine = speculate(target, draft, depth, nodes=depth + 1, tree_width=1)
    answers = [Answer() for _ in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        engine.decode([prompt], limit, frozenset(), watch=answer.note)
    return answers


def serve(
    target: Path, prompts: list[list[int]], limit: int, draft: Path | None = None, method: str = "eagle", depth: int = 6
) -> list[Answer]:
    """vLLM's answers to all prompts at once, in this process; its rounds are read where they reach the scheduler."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.core.sched.scheduler import Scheduler

    rounds: dict[str, list[tuple[int, list[int]]]] = {}
    told = Scheduler.update_draft_token_ids

    def watch(scheduler, drafted) -> None:
        for name, tokens in zip(drafted.req_ids, drafted.draft_token_ids, strict=True):
            if (request := scheduler.requests.get(name)) and not request.is_finished():
                rounds.setdefault(name.split("-")[0], []).append((request.num_output_tokens, list(tokens)))
        told(scheduler, drafted)

    options = EXACT | IN_ORDER | {"gpu_memory_utilization": 0.3}
    options["max_model_len"] = max(map(len, prompts)) + limit + 2 * depth  # near its end vLLM drafts nothing
    if draft is not None:
        options["speculative_config"] = {"method": method, "model": str(draft), "num_speculative_tokens": depth}
    sampling = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "update_draft_token_ids", watch)
        engine = LLM(str(target), **options)
        try:
            requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
            outputs = engine.generate(requests, sampling, use_tqdm=False)
        finally:
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()
    return [Answer(list(output.outputs[0].token_ids), rounds.get(output.request_id, [])) for output in outputs]


def teach(draft: DraftModel, target: Target, prompts: list[list[int]], limit: int, steps: int) -> None:
    """Let a draft learn what its target answers to these prompts, so that rounds of every length happen."""
    config, embed_head = draft.config, target.embed_head.restrict(draft.vocabulary)
    ids = torch.arange(target.spec.vocab_size) if draft.vocabulary is None else draft.vocabulary
    rows = torch.full((target.spec.vocab_size,), -100)  # what the loss passes over
    rows[ids] = torch.arange(len(ids))
    samples = []
    answers = Autoregressive(target).decode(prompts, limit, frozenset())
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt + answer.tokens])
        with torch.no_grad():
            features, inner = target.text_layers(tokens, config.aux_layers or (1,))
        samples.append((tokens, inner.flatten(2) if config.aux_layers else features))
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, draft_input = samples[step % len(samples)]
        outputs = draft(embed_head.embed(tokens[:, 1:]), draft_input[:, :-1], config.depth)
        losses = [
            cross_entropy(draft.logits(output[0, k:-1], embed_head), rows[tokens[0, 2 + k :]])
            for k, output in enumerate(outputs)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    draft.requires_grad_(False)
