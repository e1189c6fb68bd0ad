"""`load(...).generate(...)` is transformers' `generate`: same arguments, same tokens."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, TextStreamer

import poss_lightning
from poss_lightning import api, load
from poss_lightning.api import Model
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.plans import TreePlan
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer

PROMPTS = ["How many legs has a horse?", "A horse", "the target says it. The draft proposes what"]


@pytest.fixture(scope="module")
def reference():
    """A model of transformers, as a user has it in hand."""
    return tiny_model()


@pytest.fixture(scope="module")
def model(reference) -> Model:
    return load(reference, draft=tiny_draft(tiny_target(), [1, 2]), tokenizer=tiny_tokenizer(), plan=TreePlan(2, 20, 4))


def padded(side: str = "left", prompts=PROMPTS) -> dict[str, torch.Tensor]:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    return dict(tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False))


@pytest.fixture
def one() -> dict[str, torch.Tensor]:
    """One prompt, which has no padding."""
    return padded(prompts=PROMPTS[:1])


@pytest.fixture(scope="module")
def stop(reference) -> int:
    """A token that one answer has early, and another late or not at all."""
    rows = reference.generate(**padded(), max_new_tokens=30, eos_token_id=None)[:, -30:].tolist()
    places = {token: [row.index(token) if token in row else 30 for row in rows] for token in rows[0]}
    return max(places, key=lambda token: max(places[token]) - min(places[token]))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_one_prompt_is_continued_as_transformers_does(model, reference, one):
    for arguments in ({}, {"max_new_tokens": 40, "repetition_penalty": 1.3}, {"max_length": 60}):
        expected = reference.generate(**one, **arguments)
        assert torch.equal(model.generate(**one, **arguments), expected)
        assert torch.equal(model.generate(one["input_ids"], **arguments), expected)


@pytest.mark.parametrize(("more", "given", "fill"), [([], {}, 2), ([1], {"pad_token_id": 7}, 7)])
def test_a_batch_is_continued_as_transformers_does(model, reference, stop, more, given, fill):
    """Padded on the left, its rows end one by one and are filled up."""
    inputs, arguments = padded(), {"max_new_tokens": 30, "eos_token_id": [stop, *more], **given}
    expected = reference.generate(**inputs, **arguments)
    filled = (expected[:, -1] == fill).tolist()
    assert any(filled) and not all(filled), "the rows should end at different places"
    assert torch.equal(model.generate(**inputs, **arguments), expected)
    assert given or torch.equal(model.generate(inputs["input_ids"], **arguments), expected)  # padding is known


def test_stop_tokens_are_the_models_own_unless_others_are_named(stop):
    reference = tiny_model()
    reference.generation_config.eos_token_id = [stop, 1]
    model, limited = load(reference, tokenizer=tiny_tokenizer()), padded() | {"max_new_tokens": 30}
    answers = model.generate(**limited)
    assert torch.equal(answers, reference.generate(**limited)) and (answers == stop).any()
    endless = model.generate(**limited, eos_token_id=[])
    assert not (endless == 2)[:, -30:].any(), "nothing ends, nothing is filled"
    assert model.target.model is reference and reference.generation_config.eos_token_id == [stop, 1]


FORMS = [int, np.int32, torch.tensor, lambda id: [id], lambda id: (id,), lambda id: [np.int64(id)], lambda id: [[id]]]
FORMS += [lambda id: torch.tensor([id, 5]), lambda id: [torch.tensor(id), 5], lambda id: np.array([id])]
FORMS += [lambda id: [float(id)]]


def test_token_ids_have_the_forms_that_transformers_takes(model, reference, stop, one):
    """As an argument and in a config; a padding id, too."""
    for form in FORMS:
        arguments = {"max_new_tokens": 30, "eos_token_id": form(stop), "pad_token_id": torch.tensor(7)}
        expected = reference.generate(**one, **arguments)
        assert expected.shape[1] < one["input_ids"].shape[1] + 30
        assert torch.equal(model.generate(**one, **arguments), expected)
        assert torch.equal(model.generate(**one, generation_config=GenerationConfig(**arguments)), expected)


def test_what_is_no_token_id_is_refused_by_name(model, one):
    for wrong in ("</s>", ["5"], [None, 5], {5}, 190.5, -1, [5, 320], True):
        for name in ("eos_token_id", "pad_token_id"):
            with pytest.raises(ValueError, match=f"^{name} is .*; it must be one or more token ids"):
                model.generate(**one, **{name: wrong})
    wrong_stop = tiny_model()
    wrong_stop.generation_config.eos_token_id = 190.5
    with pytest.raises(ValueError, match=r"eos_token_id .*is .*; it must be one or more token ids below"):
        load(wrong_stop, tokenizer=tiny_tokenizer())


def test_a_stop_token_is_no_padding_whatever_ends_a_text(reference):
    """Many models pad with it, SmolLM2 too. A pad token that is named is padding, as in transformers."""
    tokenizer, limited = tiny_tokenizer(), {"max_new_tokens": 4}
    tokenizer.pad_token_id = end = tokenizer.eos_token_id
    model, prompt = load(reference, tokenizer=tokenizer), torch.tensor([[end, 5, end, 6]])
    for stops in ([], [7]):
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=stops, **limited)
        assert torch.equal(model.generate(prompt, eos_token_id=stops, **limited), whole)
    padded, bare = torch.tensor([[end, 5, 6]]), torch.tensor([[5, 6]])
    answer = model.generate(padded, eos_token_id=[], pad_token_id=end, **limited)
    assert torch.equal(answer[:, 1:], model.generate(bare, eos_token_id=[], **limited))


def test_right_padding_changes_no_answer(model, reference):
    """transformers warns of it and continues from the padding; here each row continues from its last real token."""
    right = padded("right")
    output = model.generate(**right, max_new_tokens=20)
    assert torch.equal(output[:, :-20], right["input_ids"])
    assert torch.equal(output[:, -20:], reference.generate(**padded(), max_new_tokens=20)[:, -20:])


def test_a_seed_draws_the_same_again_by_the_defaults_of_transformers(model):
    def drawn(**arguments) -> torch.Tensor:
        return model.generate(**padded(), do_sample=True, **arguments)

    once, generator = drawn(seed=5), torch.Generator().manual_seed(5)
    assert torch.equal(once, drawn(generator=generator, temperature=1.0, top_k=50, top_p=1.0))
    assert torch.equal(drawn(top_k=1), model.generate(**padded())) and not torch.equal(once, drawn(seed=5, top_k=5))
    several = drawn(seed=5, num_return_sequences=2)
    assert len(several) == 2 * len(PROMPTS) and not torch.equal(several[0], several[1])
    assert torch.equal(several[::2, :-20], padded()["input_ids"])


def test_a_streamer_is_told_what_transformers_would_tell_it(model, reference, one, capsys):
    told = []
    for which in (model, reference):
        which.generate(**one, max_new_tokens=30, streamer=TextStreamer(tiny_tokenizer(), skip_prompt=True))
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and told[0].endswith("\n")


def test_a_chat_answers(model, monkeypatch):
    monkeypatch.setattr(api, "ANSWER_TOKENS", 24)
    messages = [{"role": "user", "content": "Hi"}]
    prompt = model.target.chat.prompt(messages)
    short, long = (
        model.target.chat.text(Autoregressive(model.target).decode([prompt], limit)[0].tokens) for limit in (12, 24)
    )
    twelve = GenerationConfig(max_new_tokens=12)
    assert model.chat("Hi", 12) == model.chat(messages, max_new_tokens=12) == short
    assert model.chat("Hi", generation_config=twelve) == model.chat("Hi", max_length=len(prompt) + 12) == short
    assert model.chat("Hi") == model.chat("Hi", None, generation_config=GenerationConfig()) == long


def test_what_is_no_chat_is_refused_in_a_line(model):
    user = {"role": "user", "content": "Hi"}
    for messages, words in (
        ([user, user | {"content": None}], "message 1 has no content; give a text"),
        ([], "nobody speaks before the answer: no message"),
    ):
        with pytest.raises(ValueError, match=words):
            model.chat(messages)


def test_the_package_lists_its_public_names():
    assert dir(poss_lightning) == sorted(dir(poss_lightning)) and {*dir(poss_lightning)} == {*poss_lightning.__all__}
    assert all(hasattr(poss_lightning, name) for name in dir(poss_lightning))


def test_what_is_no_draft_and_a_missing_tokenizer_are_named_before_anything_is_loaded(target, reference, tmp_path):
    training = tmp_path / "version_0"
    tiny_draft(target, [1, 1]).save_pretrained(training / "draft-best")
    (training / "last.ckpt").touch()
    for name, draft, words in (
        ("no such target", training, "is a training's folder; its draft is"),
        ("no such target", training / "last.ckpt", "last.ckpt is not a complete checkpoint of plain"),
        (reference, None, "tokenizer is None; a LlamaForCausalLM in hand needs its own"),
    ):
        with pytest.raises(ValueError, match=words):
            load(name, draft=draft)


def test_a_model_is_loaded_by_name_and_works_without_a_draft(tiny_folder, target, tmp_path):
    """Plainly, with a draft, and with lookups alone."""
    tiny_draft(target, [1, 1]).save_pretrained(tmp_path)
    models = [
        load(tiny_folder, dtype="float32", **more)
        for more in ({}, {"draft": str(tmp_path)}, {"plan": TreePlan(lookup=3)})
    ]
    plain, *others = (model.generate(**padded()) for model in models)
    assert all(torch.equal(plain, other) for other in others)
    assert [model.decoder.lookup.count for model in models[1:]] == [10, 3]


TWO = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
BAD = [
    ({"token_type_ids": torch.ones(2, 3)}, "unexpected keyword argument 'token_type_ids'"),
    ({"min_new_tokens": 4}, "min_new_tokens is 4, which is not done here: leave it out; .* max_new_tokens"),
    ({"seed": 1, "generator": torch.Generator()}, "seed and generator are both given"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a valid integer"),
    ({"seed": -1}, "seed is -1; it must be greater"),
    ({"max_length": 3}, "max_length is 3 and the prompt has 3 tokens"),
    ({"streamer": TextStreamer(None)}, "streamer is for one prompt, and input_ids has 2"),
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask is \(2, 4\) and input_ids \(2, 3\)"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "row 1 has 0 between real tokens"),
    ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, "row 0 is all 0"),
    ({"generation_config": GenerationConfig(stop_strings=["x"])}, r"stop_strings is \['x'\], which"),
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"input_ids is \(1, 0\) of .*it must be \(B, T\) token ids"),
    ({"input_ids": "Why?"}, "input_ids is a str; give token ids"),
]


def test_bad_arguments_are_refused_by_name(model):
    for arguments, words in BAD:
        with pytest.raises((TypeError, ValueError), match=words):
            model.generate(**TWO | arguments)


FIELDS = {"max_new_tokens": 7, "eos_token_id": 1, "pad_token_id": 2}
NEUTRAL = {"typical_p": 1.0, "num_beams": 1, "bos_token_id": 0, "cache_implementation": "dynamic"}  # asks for nothing


def test_a_generation_config_gives_what_the_arguments_do_not(model, reference, one):
    """What else it has is taken if it asks for nothing; whether it draws is asked of the arguments, too."""
    config = GenerationConfig(**FIELDS, **NEUTRAL, repetition_penalty=1.3)
    expected = reference.generate(**one, **FIELDS, repetition_penalty=1.3)
    assert torch.equal(model.generate(**one, generation_config=config), expected)
    assert model.generate(one["input_ids"], config, max_new_tokens=3).shape[1] == one["input_ids"].shape[1] + 3
    drawing = {"temperature": 0.5, "top_k": 7}
    drawn = model.generate(**one, **FIELDS, do_sample=True, **drawing, seed=3)
    config = GenerationConfig(**FIELDS, **NEUTRAL, **drawing)
    assert torch.equal(model.generate(**one, generation_config=config, do_sample=True, seed=3), drawn)
    config = GenerationConfig(**FIELDS, do_sample=True, temperature=0.7)
    greedy = reference.generate(**one, generation_config=config, do_sample=False)
    assert torch.equal(model.generate(**one, generation_config=config, do_sample=False), greedy)


def test_what_was_accepted_can_be_read(model, target):
    model.generate(**padded(), max_new_tokens=12)
    accepted = [count for text in model.decoded for count in text.accepted]
    assert model.tau == 1 + sum(accepted) / len(accepted) and len(model.decoded) == len(PROMPTS)
    plain = Model(Autoregressive(target))
    assert plain.tau is None and plain.device == target.device
