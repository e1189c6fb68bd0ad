"""Questions about long texts: pages of docs/, cut to so many words, each with two questions.

python experiments/lookup/long.py runs/long.jsonl
"""

import json
import sys
from pathlib import Path

WORDS = 1500
ASKED = {
    "summary": "Summarise this page in one paragraph.",
    "commands": "Which commands does this page name, and what is each for?",
}

with open(sys.argv[1], "w", encoding="utf-8") as out:
    for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if len(words := text.split(" ")) < WORDS:
            continue
        for category, question in ASKED.items():
            turn = " ".join(words[:WORDS]) + "\n\n" + question
            line = {"id": f"{page.stem}-{category}", "category": category, "turns": [turn]}
            out.write(json.dumps(line) + "\n")
