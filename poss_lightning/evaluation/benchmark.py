"""`poss benchmark`: decode suites with several methods, prompt by prompt in turn, and record every answer."""

import hashlib
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from poss_lightning.decoding.autoregressive import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoded, Decoder, new_token_limits
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.int8_head import Int8Head
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import check_settings, describe, provenance
from poss_lightning.evaluation.records import BASELINES, NAMES, Record, check_names, to_line
from poss_lightning.evaluation.rounds import RoundLog
from poss_lightning.evaluation.streaming import Pieces
from poss_lightning.evaluation.suites import Question, load_suites
from poss_lightning.files import atomic, records_lock
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target.model import Target

logger = logging.getLogger(__name__)


def benchmark(
    out: str,
    drafts: dict[str, str] | None = None,
    target: str = "embedded",
    suites: list[str] | None = None,
    limit: int | None = None,
    max_new_tokens: int = 128,
    depth: int | None = None,
    nodes: int = 60,
    tree_width: int = 10,
    tree: Literal["fixed", "auto"] = "fixed",
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    baselines: list[str] | None = None,
    repeats: int = 1,
    show: int = 1,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Decode suites of prompts with every method and write records.jsonl, rounds.jsonl and run.json.

    Methods take turns prompt by prompt, in an order that rotates, after a warm-up of their own. Later turns of a
    conversation are asked after the target's own answer to the earlier ones, the same for all methods, as long as the
    target's context has room. A killed run goes on where it stopped when the command is given again, on the same
    machine and device with as many threads.

    Args:
        out: folder to write.
        drafts: name and draft (folder, hub id or shipped head) of each method, e.g. --drafts.hass runs/hass/draft-best.
        target: "embedded", a local folder or a hub id.
        suites: files or folders of JSON lines, the project's own by name, `hub:mt_bench` and the like,
            `hub:OWNER/NAME`; all of the project's own by default.
        limit: the first so many questions of each suite; all of a file, and 80 of the hub, by default.
        max_new_tokens: at most that many a turn.
        depth: draft positions K; each draft's own (the sum of its allocation) by default.
        nodes: of a tree, root included.
        tree_width: children tried a node; 1 drafts chains.
        tree: fixed, or auto: as large as expected tokens a second say, depth and nodes at most.
        temperature: of the answers; 0 is greedy. Drafts and our own loop draw alike, so in float32 they say the same.
        top_k: draw among so many likeliest tokens; 0 for all.
        top_p: draw among the likeliest tokens that hold this mass.
        seed: of what is drawn.
        baselines: of `autoregressive` (our own loop), `generate` (transformers') and `lookup` (its prompt lookup); the
            first two by default. The first is also the target's own answer, so it must be among them.
        repeats: how often each answer is decoded.
        show: questions of each suite whose rounds are written too, tree by tree, for the report to show.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32; only float32 is exact to the
            last token against the baselines.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    baselines = ["autoregressive", "generate"] if baselines is None else baselines
    config = {name: value for name, value in locals().items() if name != "out"}
    drafts = drafts or {}
    check_names(drafts)
    sampling = check(config)
    found = load_suites(suites, limit)
    questions = [question for suite in found for question in suite.questions]
    loaded = {name: Specialists.from_pretrained(folder) for name, folder in drafts.items()}
    model = Target.load(target, dtype, device)
    config |= {"dtype": model.dtype_name, "device": str(model.device)}
    for name, draft in loaded.items():
        if difference := draft.config.target.difference(model.spec):
            raise ValueError(f"draft {drafts[name]} was trained for another target: {difference}")
    for question in questions:  # what cannot be asked at all is refused before anything is written
        _prompt(model, question, [{"role": "user", "content": question.turns[0]}])
    plain = {"autoregressive": Autoregressive(model), "generate": Generate(model), "lookup": Generate(model, lookup=10)}
    methods: dict[str, Decoder] = {name: plain[name] for name in baselines}
    methods |= {name: Speculative(model, draft, depth, nodes, tree_width, tree) for name, draft in loaded.items()}
    facts = {
        "command": sys.argv,
        "config": config | {"fingerprint": model.spec.fingerprint, "questions": _digest_questions(questions)},
        "methods": {name: _facts(method) for name, method in methods.items()},
        "suites": {suite.name: suite.source for suite in found},
    }
    with records_lock(out):
        run = Run(Path(out), model, methods, facts, sampling, seed)
        run.decode(questions, max_new_tokens, repeats, show)
    print(f"{out}: {len(run.lines)} records of {len(methods)} methods")


def check(config: dict) -> Sampling:
    """How answers are drawn, of the options of a benchmark.

    Raises:
        ValueError: one of them cannot be, whatever is asked of whom.
    """
    baselines, max_new_tokens, repeats, show = (config[name] for name in ("baselines", "max_new_tokens", "repeats", "show"))
    if baselines is not None and ("autoregressive" not in baselines or set(baselines) - set(BASELINES)):
        raise ValueError(f"baselines is {baselines}; it must hold autoregressive, and may hold generate, lookup")
    if max_new_tokens < 1 or repeats < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens} and repeats {repeats}; both must be at least 1")
    if show < 0:
        raise ValueError(f"show is {show}; it must be 0 (no rounds are written) or a number of questions a suite")
    return Sampling(config["temperature"], config["top_k"], config["top_p"])


class Run:
    """Decodes questions with every method and appends their records, question by question.

    Raises:
        ValueError: the folder holds records made by other settings, or packed ones.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        methods: dict[str, Decoder],
        facts: dict,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ):
        self.folder, self.target, self.methods = folder, target, methods
        self.sampling, self.seed = sampling, seed
        self.file = folder / "records.jsonl"
        self.lines = self._go_on(facts)
        self.rounds = RoundLog(folder, self._done())

    def decode(self, questions: list[Question], max_new_tokens: int, repeats: int, show: int = 0) -> None:
        """Every question not yet recorded, all methods and repeats of it at once; rounds of `show` of each suite."""
        done = self._done()
        left = [question for question in questions if (question.suite, question.id) not in done]
        if left:
            self._join()
            self._warm_up(left[0], max_new_tokens)
        bar = tqdm(left, desc="benchmark", unit="question", initial=len(questions) - len(left), total=len(questions))
        places = {(question.suite, question.id): place for place, question in enumerate(questions)}
        for question in bar:
            place = places[question.suite, question.id]
            shown = sum(other.suite == question.suite for other in questions[:place]) < show
            records = self._question(question, max_new_tokens, repeats, place, shown)
            self.lines += map(to_line, records)
            self.rounds.write()  # before the records, which say that the question is done
            with atomic(self.file) as path:  # a question is there with all its records, or not at all
                path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def _question(self, question: Question, max_new_tokens: int, repeats: int, place: int, shown: bool) -> list[Record]:
        records, messages = [], []
        names = list(self.methods)
        for turn, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            prompt = self.target.chat.prompt(messages)
            if turn and len(prompt) >= (context := self.target.spec.context):  # a first turn's is refused before
                place = f"question {question.id} of {question.suite}"
                logger.warning("%s ends before turn %d: %d of %d tokens", place, turn, len(prompt), context)
                break
            for repeat in range(repeats):
                first = (place + turn + repeat) % len(names)
                for name in names[first:] + names[:first]:
                    drawn = torch.Generator().manual_seed(self._draws(question, turn, repeat))
                    answer = (question.suite, question.id, turn, name)
                    watch = self.rounds.watch(answer, self.target) if shown and repeat == 0 else None
                    decoded = self.methods[name].decode([prompt], max_new_tokens, None, self.sampling, drawn, watch)[0]
                    records.append(self._record(question, turn, name, repeat, len(prompt), decoded))
            own = next(record for record in records if (record.turn, record.method) == (turn, "autoregressive"))
            messages.append({"role": "assistant", "content": own.text})
        return records

    def _record(
        self, question: Question, turn: int, method: str, repeat: int, prompt_tokens: int, decoded: Decoded
    ) -> Record:
        return Record(
            suite=question.suite,
            id=question.id,
            turn=turn,
            method=method,
            repeat=repeat,
            seed=self.seed,
            prompt_tokens=prompt_tokens,
            new_tokens=len(decoded.tokens),
            accepted=decoded.accepted,
            seconds={part: round(seconds, 6) for part, seconds in decoded.seconds.items()},
            tokens=decoded.tokens,
            text=self.target.chat.text(decoded.tokens),
            pieces=_pieces(self.target, decoded.tokens),
        )

    def _done(self) -> set[tuple[str, int | str]]:
        """Suite and id of every question that has its records."""
        return {(line["suite"], line["id"]) for line in map(json.loads, self.lines)}

    def _draws(self, question: Question, turn: int, repeat: int) -> int:
        """The seed of an answer's draws, the same for all methods."""
        place = f"{self.seed} {question.suite} {question.id} {turn} {repeat}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:6])

    def _warm_up(self, question: Question, max_new_tokens: int) -> None:
        prompt = self.target.chat.prompt([{"role": "user", "content": question.turns[0]}])
        for method in self.methods.values():
            method.decode([prompt], min(max_new_tokens, 16))
        self._note(json.loads((self.folder / "run.json").read_text()) | self._costs())

    def _costs(self) -> dict:
        """What `tree: auto` measured of each draft, for `poss compare` to say whether drafting pays here."""
        measured = {name: method.costs for name, method in self.methods.items() if isinstance(method, Speculative)}
        found = {name: costs._asdict() for name, costs in measured.items() if costs is not None}
        return {"costs": found} if found else {}

    def _go_on(self, facts: dict) -> list[str]:
        """Lines of an earlier, killed run of the same settings; else begin with run.json."""
        if (packed := self.folder / NAMES[1]).exists():
            raise ValueError(f"{packed} holds records: unpack it (gunzip) to go on, or choose another folder")
        if self.file.exists():
            check_settings(self.folder, facts["config"], facts["methods"])
            return self.file.read_text(encoding="utf-8").rstrip("\n").split("\n")
        self._note(facts)
        return []

    def _join(self) -> None:
        """Note this process beside those that began the records that are there.

        Raises:
            ValueError: theirs were made where a second is not what it is here.
        """
        here, earlier = provenance(self.target.device), json.loads((self.folder / "run.json").read_text())
        for fact in ("machine", "device", "threads"):
            if self.lines and earlier.get(fact, here[fact]) != here[fact]:
                raise ValueError(
                    f"{self.folder} was begun with {fact} {earlier[fact]!r}, here it is {here[fact]!r}; seconds of "
                    "the two do not compare: go on there, or choose another folder"
                )
        self._note(earlier | (here if not self.lines else {"gone_on": [*earlier.get("gone_on", []), here]}))

    def _note(self, facts: dict) -> None:
        with atomic(self.folder / "run.json") as path:
            path.write_text(json.dumps(facts, indent=1) + "\n")


def _facts(method: Decoder) -> dict:
    if not isinstance(method, Speculative):
        return {}
    drafter = method.drafter
    return {
        "depth": drafter.depth,
        "nodes": method.nodes,
        "tree": method.tree,
        "tree_width": drafter.tree_width,
        "int8_head": isinstance(drafter.product, Int8Head),
        **describe(drafter.draft),
    }


def _digest_questions(questions: list[Question]) -> str:
    return hashlib.sha256(json.dumps([asdict(question) for question in questions]).encode()).hexdigest()[:16]


def _prompt(target: Target, question: Question, messages: list[dict]) -> list[int]:
    prompt = target.chat.prompt(messages)
    try:
        new_token_limits(target, [prompt], limit=1)
    except ValueError as error:
        turn = len(messages) // 2
        raise ValueError(f"question {question.id} of {question.suite}, turn {turn}: {error}") from error
    return prompt


def _pieces(target: Target, tokens: list[int]) -> list[str]:
    """What each token adds to the text: a letter split over tokens belongs to its last; a stop token adds nothing."""
    pieces = Pieces(target.chat.text)
    said = [pieces.add([token]) for token in tokens]
    return [*said[:-1], said[-1] + pieces.rest()] if said else []
