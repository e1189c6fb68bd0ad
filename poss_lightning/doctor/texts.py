"""What a draft is measured on: the target's own answers, and all that a reading may read of the target there."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path

import torch
from tqdm import tqdm

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.corpus.sampling_record import Draw
from poss_lightning.corpus.writer import CorpusWriter
from poss_lightning.evaluation.suites import Question
from poss_lightning.features.shards import TokenizedText
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.features.writing import tokenize
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.synthesize import answer_questions
from poss_lightning.target_model.model import Target

ANSWERS, DRAWN, LONG = "answers", "temperature 1", "one long text"
SWITCHES: dict[str, Callable[[Question], Question]] = {  # of the chat template, where they change a prompt
    "thoughts on": lambda question: replace(question, template=question.template | {"enable_thinking": True}),
    "thoughts off": lambda question: replace(question, template=question.template | {"enable_thinking": False}),
    "no system message": lambda question: replace(question, opening=[{"role": "system", "content": ""}]),
}
FROM_STORE: dict[str, list[Question]] = {ANSWERS: [], LONG: []}  # texts that no question is asked for


def ask(target: Target, questions: list[Question]) -> dict[str, list[Question]]:
    """Put the questions in every form whose answers are measured, by name."""
    forms = FROM_STORE | {ANSWERS: questions, DRAWN: questions}
    for name, change in SWITCHES.items():
        form = [change(question) for question in questions]
        with suppress(ValueError):  # the template refuses it
            if form[0].first_prompt(target.chat) != questions[0].first_prompt(target.chat):
                forms[name] = form
    return forms


@torch.inference_mode()
def read(target: Target, text: TokenizedText) -> Sample:
    """Read a text: the outputs of all of the target's layers, and its feature as one more, (T, L+1, D)."""
    tokens = torch.tensor(text.tokens, device=target.device)
    features, inner = target.text_layers(tokens[None], tuple(range(1, target.spec.layers + 1)))
    greedy = torch.full_like(tokens, -1)
    for start, stop in text.spans:
        slots = slice(max(start, 1) - 1, stop - 1)
        greedy[slots] = target.logits(features[0, slots]).argmax(-1)
    layers = torch.cat([inner[0], features[0, :, None]], dim=1)
    draws = [Draw.of(draw) if draw else None for draw in text.draws]
    return Sample(text.id, tokens, greedy, text.spans, features[0], layers, draws)


@dataclass(frozen=True, eq=False)
class TargetAnswers:
    """The target's answers to questions, written to `folder`, or those of a store; read when they are asked for."""

    target: Target
    folder: Path
    asked: dict[str, list[Question]]  # by name, as `ask` gives them, or `FROM_STORE`
    answer_tokens: int
    store: FeatureStore | None
    limit: int

    @cache  # noqa: B019, there is one in a process
    def samples(self, name: str = ANSWERS) -> list[Sample]:
        """Read the texts of a name, in the order of `ANSWERS`, with the answer there where one is missing.

        `LONG` has them one after another, as many as the target's context holds, each of which sees all before it.
        """
        if name == LONG:
            return self._join(self.samples())
        if self.store:
            return [self._stored(i, self.store) for i in range(min(self.limit, len(self.store)))]
        texts = tqdm(self._answered(name), desc=f"read {name}", leave=False)
        found = {text.id: read(self.target, text) for text in texts}
        return [found.get(each.id, each) for each in self.samples()] if name != ANSWERS else [*found.values()]

    @torch.inference_mode()
    def _stored(self, i: int, store: FeatureStore) -> Sample:
        """Read a sample, with the store's features, so that measures are those of `validate` and `replay`."""
        stored = store[i]
        layers = read(self.target, TokenizedText(stored.id, stored.tokens.tolist(), stored.spans)).layers
        own = torch.cat([stored.layers, stored.features[:, None]], dim=1)
        layers[:, [*(layer - 1 for layer in store.layers), -1]] = own.to(layers)
        return stored._replace(layers=layers)

    def _join(self, samples: list[Sample]) -> list[Sample]:
        stops = [*takewhile(self.target.spec.context.__ge__, accumulate(len(each.tokens) for each in samples))]
        starts = [0, *stops[:-1]]
        spans = [
            (first + own, first + end) for each, first in zip(samples, starts, strict=False) for own, end in each.spans
        ]
        tokens = torch.cat([each.tokens for each in samples])[: stops[-1]].tolist()
        whole = read(self.target, TokenizedText(LONG, tokens, spans))
        return [
            Sample(each.id, whole.tokens[own], whole.greedy[own], each.spans, whole.features[own], whole.layers[own])
            for each, own in zip(samples, map(slice, starts, stops), strict=False)
        ]

    def _answered(self, name: str) -> list[TokenizedText]:
        path = self.folder / f"{name.replace(' ', '-')}.jsonl"
        if not path.exists():
            answer = Sampling(1.0) if name == DRAWN else GREEDY, self.answer_tokens
            options = {"batch_size": 32, "seed": 0, "settings": {}, "strict": False}
            answer_questions(CorpusWriter(str(path)), self.target, self.asked[name], answer=answer, **options)
        return tokenize(self.target, read_conversations(str(path)), self.target.spec.context)
