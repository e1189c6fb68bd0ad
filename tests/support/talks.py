"""Short talks, and the options of an EAGLE-3 draft."""

from poss_lightning.corpus.readers import Conversation

WORDS = ["the sky is blue", "why is it so", "tell me a story", "water flows down", "a cat sat here", "count to ten"]
EAGLE3 = {"kind": "eagle3", "loss": {"token": 1.0}, "gamma": 0.9, "detach": False}


def talks() -> list[Conversation]:
    return [
        Conversation(
            str(i),
            [
                {"role": "user", "content": WORDS[i % 6]},
                {"role": "assistant", "content": f"{WORDS[(i + 1) % 6]} {i} " * (1 + i % 3)},
            ],
        )
        for i in range(40)
    ]
