"""`load(...).generate(...)` is transformers' `generate`: same arguments, same tokens."""

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from poss_lightning import decoding, load
from poss_lightning.decoding.api import Model
from poss_lightning.decoding.autoregressive import Autoregressive
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer

PROMPTS = ["How many legs has a horse?", "A horse", "the target says it. The draft proposes what"]


@pytest.fixture(scope="module")
def reference():
    """A model of transformers, as a user has it in hand."""
    return tiny_model()


@pytest.fixture(scope="module")
def model(reference) -> Model:
    return load(reference, draft=tiny_draft(tiny_target(), [1, 2]), tokenizer=tiny_tokenizer(), nodes=20, tree_width=4)


@pytest.mark.parametrize(
    ("given", "count"), [({}, 10), ({"tree": "fixed"}, 0), ({"lookup": 3}, 3), ({"lookup": 0}, 0)], ids=str
)
def test_trees_made_for_speed_have_lookups(reference, given, count):
    model = load(reference, draft=tiny_draft(tiny_target(), [1, 2]), tokenizer=tiny_tokenizer(), **given)
    assert model.decoder.lookup.count == count


def padded(side: str) -> dict[str, torch.Tensor]:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    return dict(tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False))


@pytest.fixture(scope="module")
def stop(reference) -> int:
    """A token that one answer has early, and another late or not at all."""
    rows = reference.generate(**padded("left"), max_new_tokens=30, eos_token_id=None)[:, -30:].tolist()
    places = {token: [row.index(token) if token in row else 30 for row in rows] for token in rows[0]}
    return max(places, key=lambda token: max(places[token]) - min(places[token]))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("arguments", [{}, {"max_new_tokens": 1}, {"max_new_tokens": 40}, {"max_length": 60}])
def test_one_prompt_is_continued_as_transformers_does(model, reference, arguments):
    inputs = tiny_tokenizer()(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    expected = reference.generate(**inputs, **arguments)
    assert torch.equal(model.generate(**inputs, **arguments), expected)
    assert torch.equal(model.generate(inputs["input_ids"], **arguments), expected)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("pad", [None, 7])
def test_a_batch_is_continued_as_transformers_does(model, reference, stop, many, pad):
    """Padded on the left, its rows end one by one and are filled up."""
    inputs, stops = padded("left"), [stop, 1] if many else stop
    arguments = {"max_new_tokens": 30, "eos_token_id": stops} | ({} if pad is None else {"pad_token_id": pad})
    expected = reference.generate(**inputs, **arguments)
    filled = (expected[:, -1] == (2 if pad is None else pad)).tolist()
    assert any(filled) and not all(filled), "the rows should end at different places"
    assert torch.equal(model.generate(**inputs, **arguments), expected)
    assert pad or torch.equal(model.generate(inputs["input_ids"], **arguments), expected)  # padding is known by itself


def test_stop_tokens_are_the_models_own_unless_others_are_named(stop):
    reference = tiny_model()
    reference.generation_config.eos_token_id = [stop, 1]
    model = load(reference, tokenizer=tiny_tokenizer())
    inputs, limit = padded("left"), {"max_new_tokens": 30}
    assert torch.equal(model.generate(**inputs, **limit), reference.generate(**inputs, **limit))
    assert (model.generate(**inputs, **limit) == stop).any()
    assert not (model.generate(**inputs, **limit, eos_token_id=[]) == 2)[:, -30:].any(), (
        "nothing ends, nothing is filled"
    )


@pytest.mark.parametrize("pad", [None, "the stop"])
def test_a_stop_token_is_no_padding_whatever_ends_a_text(reference, pad):
    """Many models pad with it, SmolLM2 too. A pad token that is named is padding, as in transformers."""
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    tokenizer.pad_token_id = pad and end
    model = load(reference, tokenizer=tokenizer)
    prompt = torch.tensor([[end, 5, end, 6]])
    for stops in ([], [7]):
        given = {"max_new_tokens": 4, "eos_token_id": stops}
        bare = model.generate(prompt, **given)
        assert torch.equal(bare, model.generate(prompt, attention_mask=torch.ones_like(prompt), **given))
    left = torch.tensor([[end, 5, 6]])
    padded = model.generate(left, max_new_tokens=4, eos_token_id=[], pad_token_id=end)
    assert torch.equal(padded[:, 1:], model.generate(left[:, 1:], max_new_tokens=4, eos_token_id=[]))


def test_right_padding_changes_no_answer(model, reference):
    """transformers warns of it and goes on from the padding; here each row goes on from its last real token."""
    left, right = padded("left"), padded("right")
    output = model.generate(**right, max_new_tokens=20)
    assert torch.equal(output[:, :-20], right["input_ids"])
    assert torch.equal(output[:, -20:], reference.generate(**left, max_new_tokens=20)[:, -20:])


def test_drawing_is_by_the_defaults_of_transformers(model):
    inputs = padded("left")

    def drawn(**law) -> torch.Tensor:
        return model.generate(**inputs, do_sample=True, generator=torch.Generator().manual_seed(0), **law)

    assert torch.equal(drawn(), drawn(temperature=1.0, top_k=50, top_p=1.0)) and not torch.equal(
        drawn(), drawn(top_k=5)
    )
    assert torch.equal(drawn(top_k=1), model.generate(**inputs))


@pytest.mark.parametrize("skip", [False, True])
def test_a_streamer_is_told_what_transformers_would_tell_it(model, reference, capsys, skip):
    inputs = tiny_tokenizer()(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    for which in (model, reference):
        which.generate(**inputs, max_new_tokens=30, streamer=TextStreamer(tiny_tokenizer(), skip_prompt=skip))
    told = capsys.readouterr().out
    half = len(told) // 2
    assert told[:half] == told[half:] and told[:half].endswith("\n")


def test_a_chat_answers(model, monkeypatch):
    monkeypatch.setattr(decoding.api, "ANSWER_TOKENS", 24)
    prompt = model.target.chat.prompt([{"role": "user", "content": "Hi"}])
    (expected,) = Autoregressive(model.target).decode([prompt], 12)
    assert model.chat("Hi", max_new_tokens=12) == model.target.chat.text(expected.tokens)
    assert model.chat([{"role": "user", "content": "Hi"}], max_new_tokens=12) == model.chat("Hi", max_new_tokens=12)
    twelve = GenerationConfig(max_new_tokens=12)
    assert model.chat("Hi", generation_config=twelve) == model.chat("Hi", max_new_tokens=12)
    assert model.chat("Hi", max_length=len(prompt) + 12) == model.chat("Hi", 12)
    longest = model.chat("Hi", max_new_tokens=24)
    assert model.chat("Hi") == model.chat("Hi", None) == longest
    assert model.chat("Hi", generation_config=GenerationConfig()) == longest


USER = {"role": "user", "content": "Hi"}
NO_CHATS = [
    ([{"role": "user", "content": None}], "message 0 has no content; give a text"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": []}, USER], "message 1 has no content"),
    ([{"content": "Hi"}], "message 0 has no 'role'"),
    ([{"role": "assistant", "content": "x"}, USER], "message 0 is the assistant's"),
    ([], "there are no messages"),
]


@pytest.mark.parametrize(("messages", "words"), NO_CHATS, ids=str)
def test_what_is_no_chat_is_refused_in_a_line(model, messages, words):
    with pytest.raises(ValueError, match=words) as caught:
        model.chat(messages)
    assert "\n" not in str(caught.value)


def test_what_is_there_and_no_draft_is_named_before_the_target_is_loaded(target, tmp_path):
    training = tmp_path / "version_0"
    tiny_draft(target, [1, 1]).save_pretrained(training / "draft-best")
    (training / "last.ckpt").touch()
    for path, words in ((training, "is a training's folder; its draft is"), (training / "last.ckpt", "poss export")):
        for draft in (path, str(path)):
            with pytest.raises(ValueError, match=words):
                load("no such target", draft=draft)


def test_a_model_is_loaded_by_name_and_works_without_a_draft(tiny_folder, target, tmp_path):
    tiny_draft(target, [1, 1]).save_pretrained(tmp_path)
    inputs = padded("left")
    outputs = [load(tiny_folder, draft, dtype="float32").generate(**inputs) for draft in (None, str(tmp_path))]
    assert torch.equal(*outputs)


def test_a_model_in_hand_stays_as_it_was(model, reference):
    assert model.target.model is reference and reference.generation_config.eos_token_id == 1


TWO = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
BAD = [
    ({"num_beams": 4}, TypeError, "num_beams"),
    ({"token_type_ids": TWO["input_ids"]}, TypeError, "token_type_ids"),
    ({"temperature": 0.5}, ValueError, "temperature is 0.5, which has no effect without do_sample=True"),
    ({"max_new_tokens": 0}, ValueError, "must be at least 1"),
    ({"num_return_sequences": 2}, ValueError, "num_return_sequences is 2; it must be 1, or more with do_sample=True"),
    ({"seed": 1, "generator": torch.Generator()}, ValueError, "seed and generator are both given"),
    ({"max_length": 3}, ValueError, "max_length is 3 and the prompt has 3 tokens"),
    ({"streamer": TextStreamer(None)}, ValueError, "streamer is for one prompt, and input_ids has 2"),
    ({"attention_mask": torch.ones(2, 4)}, ValueError, r"attention_mask is \(2, 4\) and input_ids \(2, 3\)"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, ValueError, "row 1 has 0 between real tokens"),
    ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, ValueError, "row 0 is all 0"),
    ({"generation_config": GenerationConfig(stop_strings=["x"])}, ValueError, r"sets stop_strings to \['x'\], which"),
    ({"generation_config": GenerationConfig(guidance_scale=1.5)}, ValueError, "sets guidance_scale to 1.5, which"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD)
def test_bad_arguments_are_refused_by_name(model, arguments, error, words):
    with pytest.raises(error, match=words):
        model.generate(**TWO, **arguments)


def test_a_model_in_hand_needs_its_tokenizer(reference):
    with pytest.raises(ValueError, match="tokenizer is None; a LlamaForCausalLM in hand needs its own"):
        load(reference)


@pytest.mark.parametrize(
    "ids", [torch.zeros(3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 3), "Why?"]
)
def test_what_are_no_token_ids_is_said(model, ids):
    with pytest.raises((TypeError, ValueError), match=r"input_ids is .*(it must be \(B, T\)|give) token ids"):
        model.generate(ids)


# --- what a user of transformers looks for ---


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_repetition_penalty_is_transformers_own(model, reference, penalty):
    inputs = padded("left")
    given = {"max_new_tokens": 20, "repetition_penalty": penalty}
    expected = reference.generate(**inputs, **given)
    assert torch.equal(model.generate(**inputs, **given)[0], expected[0])  # of other rows it would punish the padding


def test_a_generation_config_gives_what_is_not_said(model, reference):
    inputs = tiny_tokenizer()(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.3, eos_token_id=1, pad_token_id=2)
    assert torch.equal(
        model.generate(**inputs, generation_config=config), reference.generate(**inputs, generation_config=config)
    )
    assert model.generate(inputs["input_ids"], config, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


NEUTRAL = {  # what configs on the hub say that asks for nothing
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "guidance_scale": 1.0,
    "suppress_tokens": [],
    "cache_implementation": "dynamic",
    "output_scores": False,
    "num_return_sequences": 1,
}


def test_what_a_config_says_without_asking_for_anything_is_taken(model, reference):
    inputs = tiny_tokenizer()(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    given = {"max_new_tokens": 7, "eos_token_id": 1, "pad_token_id": 2}
    config = GenerationConfig(**given, **NEUTRAL)
    assert torch.equal(model.generate(**inputs, generation_config=config), reference.generate(**inputs, **given))
    given |= {"do_sample": True, "top_k": 20}
    drawn = model.generate(**inputs, **given, seed=3)
    assert torch.equal(model.generate(**inputs, generation_config=GenerationConfig(**given, **NEUTRAL), seed=3), drawn)


def test_whether_a_config_draws_is_asked_of_the_arguments_too(model, reference):
    inputs = tiny_tokenizer()(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    half = GenerationConfig(temperature=0.5, top_k=7, max_new_tokens=12)
    said = model.generate(**inputs, do_sample=True, temperature=0.5, top_k=7, max_new_tokens=12, seed=3)
    assert torch.equal(model.generate(**inputs, generation_config=half, do_sample=True, seed=3), said)
    draws = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=7, eos_token_id=1, pad_token_id=2)
    greedy = reference.generate(**inputs, generation_config=draws, do_sample=False)
    assert torch.equal(model.generate(**inputs, generation_config=draws, do_sample=False), greedy)


def test_a_seed_draws_the_same_again_and_several_answers_of_each_prompt(model):
    inputs = padded("left") | {"do_sample": True, "max_new_tokens": 12}
    once = model.generate(**inputs, seed=5, num_return_sequences=2)
    assert len(once) == 2 * len(PROMPTS) and not torch.equal(once[0], once[1])
    assert torch.equal(once[::2, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    assert torch.equal(
        once, model.generate(**inputs, generator=torch.Generator().manual_seed(5), num_return_sequences=2)
    )


def test_what_was_accepted_can_be_read(model, target):
    model.generate(**padded("left"), max_new_tokens=12)
    accepted = [count for text in model.decoded for count in text.accepted]
    assert model.tau == 1 + sum(accepted) / len(accepted) and len(model.decoded) == len(PROMPTS)
    plain = Model(Autoregressive(target))
    assert plain.tau is None and plain.device == target.device
