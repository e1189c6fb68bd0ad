"""Replay with a draft's head in 8 bits, as a CPU decodes, to compare its acceptance with that of `dev/hass`.

`python experiments/shipped-1300/rounded.py OUT`, after `make lab`; `dev/hass` reads the head as it is.
"""

import sys
from functools import partial

from poss_lightning.evaluation import replay

replay.Drafter = partial(replay.Drafter, int8_head=True)
replay.replay("runs/lab/dev", sys.argv[1], drafts={"hass-rounded": "embedded-hass"})
