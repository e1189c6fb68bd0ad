"""What a draft is measured on: the target's own answers, and all that a variant may read of the target there."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.evaluation.suites import Question
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.sampling import GREEDY, Draw, Sampling, last_draws
from poss_lightning.target_model.generation import PlainDecoder
from poss_lightning.target_model.model import Target

ANSWERS, DRAWN, LONG = "answers", "temperature 1", "one long text"
SWITCHES: dict[str, Callable[[Question], Question]] = {  # of the chat template, where they change a prompt
    "thoughts on": lambda question: replace(question, template=question.template | {"enable_thinking": True}),
    "thoughts off": lambda question: replace(question, template=question.template | {"enable_thinking": False}),
    "no system message": lambda question: replace(question, opening=[{"role": "system", "content": ""}]),
}
FORM_PROMPTS = 12  # prompts at most that are answered in other forms than the usual one
ROWS = 64  # answers that are written side by side
Answer = list[Any]  # form, number of the prompt, tokens of prompt and of answer, and how it was drawn; JSON holds it


def make_prompts(target: Target, questions: list[Question]) -> dict[str, dict[int, list[int]]]:
    """Tokenise the questions in every form whose answers are measured, by form and number."""

    def prompt(question: Question) -> list[int]:
        try:
            return question.first_prompt(target.chat)
        except ValueError as error:
            raise ValueError(f"{question}: {error}") from error

    usual = {number: prompt(question) for number, question in enumerate(questions)}
    some = {number: usual[number] for number in [*usual][:: max(1, len(usual) // FORM_PROMPTS)]}
    forms = {ANSWERS: usual, DRAWN: some}
    for form, change in SWITCHES.items():
        with suppress(ValueError):  # the template refuses it
            prompts = {number: prompt(change(questions[number])) for number in some}
            forms |= {form: prompts} if prompts != some else {}
    return forms


@torch.inference_mode()
def write_answers(target: Target, forms: dict[str, dict[int, list[int]]], answer_tokens: int) -> list[Answer]:
    """Let the target answer all prompts, the greedy ones in one batch."""
    written, loop = list[Answer](), PlainDecoder(target)
    for sampling, names in ((GREEDY, [form for form in forms if form != DRAWN]), (Sampling(1.0), [DRAWN])):
        asked = [(form, number, prompt) for form in names for number, prompt in forms[form].items()]
        prompts = [prompt for *_, prompt in asked]
        limits = [min(answer_tokens, target.spec.context - len(prompt)) for prompt in prompts]
        chance, rows = torch.Generator().manual_seed(0), min(ROWS, len(prompts))
        answers = loop.generate(prompts, limits, target.chat.stops, sampling, chance, rows)
        draws = [draw and draw.values() for draw in last_draws(loop.sampler, len(prompts))]
        written += [[*each, *how] for each, *how in zip(asked, answers, draws, strict=True)]
    return written


@torch.inference_mode()
def read_text(target: Target, sample: Sample) -> Sample:
    """Read a text: the outputs of all of the target's layers, and its feature as one more, (T, L+1, D)."""
    tokens = sample.tokens.to(target.device)
    features, inner = target.text_layers(tokens[None], tuple(range(1, target.spec.layers + 1)))
    greedy = torch.full_like(tokens, -1)
    for start, stop in sample.spans:
        slots = slice(max(start, 1) - 1, stop - 1)
        greedy[slots] = target.logits(features[0, slots]).argmax(-1)
    layers = torch.cat([inner[0], features[0, :, None]], dim=1)
    return sample._replace(tokens=tokens, greedy=greedy, features=features[0], layers=layers)


class Answers:
    """Answers of the target, or those of a store, as samples that are read when they are first asked for.

    Attributes:
        forms: their names; `LONG` is `ANSWERS` one after another, each of which sees all before it.
        count: prompts.
    """

    def __init__(self, target: Target, written: list[Answer], store: FeatureStore | None = None, limit: int = 0):
        self.target, self.written, self.store = target, written, store
        self.forms = {ANSWERS, LONG, *(form for form, *_ in written)}
        self.count = limit if store else 1 + max(number for _, number, *_ in written)
        self._samples = dict[str, dict[int, Sample]]()

    def samples(self, form: str = ANSWERS) -> dict[int, Sample]:
        """Return the samples of a form, by the number of the prompt."""
        if form not in self._samples:
            read = self._join if form == LONG else partial(self._stored, self.store) if self.store else self._read
            self._samples[form] = read(form)
        return self._samples[form]

    def _read(self, form: str) -> dict[int, Sample]:
        samples = dict[int, Sample]()
        written = [each for each in self.written if each[0] == form]
        for _, number, prompt, answer, draw in tqdm(written, f"read {form}", leave=False):
            end = answer[-1:] if answer[-1] in self.target.chat.stops else []  # what ends a text counts as cut
            tokens, draws = torch.tensor(prompt + answer + end), [draw and Draw.of(draw)]
            spans = [(len(prompt), len(prompt) + len(answer))]
            samples[number] = read_text(self.target, Sample(str(number), tokens, tokens, spans, tokens, draws=draws))
        return samples

    @torch.inference_mode()
    def _stored(self, store: FeatureStore, form: str) -> dict[int, Sample]:
        """Read samples, with the store's features, so that measures are those of `validate` and `replay`."""
        samples = {number: store[number] for number in range(self.count)}
        for number, stored in samples.items():
            layers = read_text(self.target, stored).layers
            in_store = torch.cat([stored.layers, stored.features[:, None]], dim=1)
            layers[:, [*(layer - 1 for layer in store.layers), -1]] = in_store.to(layers)
            samples[number] = stored._replace(layers=layers)
        return samples

    def _join(self, form: str) -> dict[int, Sample]:
        """Read as many samples as the target's context holds as one text, and cut it where they begin."""
        samples = self.samples()
        stops = [*takewhile(self.target.spec.context.__ge__, accumulate(len(each.tokens) for each in samples.values()))]
        cuts = {
            number: slice(stop - len(samples[number].tokens), stop)
            for number, stop in zip(samples, stops, strict=False)
        }
        spans = [(cut.start + a, cut.start + b) for number, cut in cuts.items() for a, b in samples[number].spans]
        tokens = torch.cat([samples[number].tokens for number in cuts])
        whole = read_text(self.target, Sample(form, tokens, tokens, spans, tokens))
        parts = ("tokens", "greedy", "features", "layers")
        return {
            number: samples[number]._replace(draws=(), **{name: getattr(whole, name)[cut] for name in parts})
            for number, cut in cuts.items()
        }
