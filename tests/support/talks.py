"""Short talks, sizes of a store of them, and the options of an EAGLE-3 and of a block draft."""

import gzip
import json
from pathlib import Path

from poss_lightning.corpus.readers import Conversation, read_conversations
from poss_lightning.shipped import CORPUS

WORDS = ["the sky is blue", "why is it so", "tell me a story", "water flows down", "a cat sat here", "count to ten"]
SIZES = {"max_length": 128, "batch_tokens": 1024, "shard_bytes": 2**20}
EAGLE3 = {"kind": "eagle3", "loss": {"token": 1.0}, "gamma": 0.9, "detach": False}

BLOCK = {"kind": "block", "block_layers": 2, "gamma": 0.78}


def talks() -> list[Conversation]:
    found = []
    for i in range(40):
        asked, said = WORDS[i % 6], f"{WORDS[(i + 1) % 6]} {i} " * (1 + i % 3)
        found.append(Conversation(str(i), [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]))
    return found


def shortened(path: Path) -> Path:
    """Write the beginnings of the shipped corpus's texts: the tiny tokenizer makes a token of nearly every letter."""
    talks = read_conversations(str(CORPUS), limit=60)
    short = [[message | {"content": message["content"][:100]} for message in talk.messages] for talk in talks]
    path.write_bytes(gzip.compress("".join(json.dumps({"messages": each}) + "\n" for each in short).encode()))
    return path
