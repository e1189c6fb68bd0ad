"""What a draft is measured on: the target's own answers, and all that a reading may read of the target there."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from poss_lightning.corpus.draws import Draw
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.corpus.writer import CorpusWriter
from poss_lightning.evaluation.answers import answer_questions
from poss_lightning.evaluation.suites import Question
from poss_lightning.features.shards import TokenizedText
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.features.writing import tokenize
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target.model import Target

ANSWERS, DRAWN, DIALOGUE = "answers", "temperature 1", "one dialogue"
SWITCHES = "thoughts on", "thoughts off", "no system message"  # of the template, where they change a prompt
LARGEST = 448.0  # of float8


def ask(target: Target, questions: list[Question]) -> dict[str, list[Question]]:
    """Put the questions in every form whose answers are measured, by name; "one dialogue" grows long."""
    on, off = (
        [replace(each, template=each.template | {"enable_thinking": is_on}) for each in questions]
        for is_on in (True, False)
    )
    silent = [replace(each, opening=[{"role": "system", "content": ""}]) for each in questions]
    forms = {ANSWERS: questions}
    for name, form in zip(SWITCHES, (on, off, silent), strict=True):
        with suppress(ValueError):  # the template refuses it
            if form[0].first_prompt(target.chat) != questions[0].first_prompt(target.chat):
                forms[name] = form
    turns = [turn for each in questions for turn in each.turns]
    return forms | {DRAWN: questions, DIALOGUE: [replace(questions[0], turns=turns)]}


def round_cache(model: nn.Module) -> ExitStack:
    """Round keys and values to float8, as a cache of 8 bits does after the keys have rotated; until it is closed."""
    stack = ExitStack()
    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            stack.enter_context(module.register_forward_hook(_round))
    return stack


def _round(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(output.dtype)


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


@torch.inference_mode()
def _as_stored(sample: Sample, stored: Sample, layers: tuple[int, ...]) -> Sample:
    """Put in what a store has, so that measures are those of `poss validate` and `poss replay` to the digit."""
    sample.layers[:, [*(layer - 1 for layer in layers), -1]] = torch.cat(
        [stored.layers, stored.features[:, None]], dim=1
    ).to(sample.layers)
    return stored._replace(layers=sample.layers)


def _split(samples: list[Sample], names: list[str]) -> list[Sample]:
    """Split a dialogue into samples of one answer each, which have all before it."""
    answers = [(sample, start, stop) for sample in samples for start, stop in sample.spans]
    split = []
    for name, (sample, start, stop) in zip(names, answers, strict=False):
        tokens, greedy = sample.tokens[: stop + 1], sample.greedy[: stop + 1]
        features, layers = sample.features[: stop + 1], sample.layers[: stop + 1]
        split.append(Sample(name, tokens, greedy, [(start, stop)], features, layers))
    return split


@dataclass(frozen=True, eq=False)
class SampleSource:
    """The target's answers to questions, or those of a store, written to `folder` and read when they are asked for."""

    target: Target
    folder: Path
    asked: dict[str, list[Question]]  # by name, as `ask` gives them; {} of a store
    answer_tokens: int
    store: FeatureStore | None
    limit: int

    def has(self, name: str) -> bool:
        """Return whether there are texts of this name."""
        return name in self.asked or (name == ANSWERS and self.store is not None)

    @cache  # noqa: B019, there is one in a process
    def samples(self, name: str = ANSWERS, eight_bits: bool = False) -> list[Sample]:
        """Read the texts of a name, in the order of `ANSWERS`, with the answer there where one is missing."""
        texts = self._of_store(self.store) if self.store else self._answered(name)
        with round_cache(self.target.backbone) if eight_bits else ExitStack():
            found = [read(self.target, text) for text in tqdm(texts, desc=f"read {name}", leave=False)]
        if self.store and not eight_bits:
            return [_as_stored(each, self.store[i], self.store.layers) for i, each in enumerate(found)]
        if name == DIALOGUE:
            found = _split(found, [f"{each.suite}/{each.id}" for each in self.asked[ANSWERS]])
        by_id = {each.id: each for each in found}
        return found if name == ANSWERS else [by_id.get(each.id, each) for each in self.samples()]

    def _of_store(self, store: FeatureStore) -> list[TokenizedText]:
        return [
            TokenizedText(store.ids[i], store.tokens(i).tolist(), store[i].spans)
            for i in range(min(self.limit, len(store)))
        ]

    def _answered(self, name: str) -> list[TokenizedText]:
        path = self.folder / f"{name.replace(' ', '-')}.jsonl"
        if not path.exists():
            sampling = Sampling(1.0) if name == DRAWN else GREEDY
            options = {"batch_size": 32, "seed": 0, "settings": {}, "strict": False}
            corpus, answer = CorpusWriter(str(path)), (sampling, self.answer_tokens)
            answer_questions(corpus, self.target, self.asked[name], answer=answer, **options)
        return tokenize(self.target, read_conversations(str(path)), self.target.spec.context)
