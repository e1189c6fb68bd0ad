"""What reading a draft's head in 8 bits, as decoding does on a CPU, costs in acceptance: a replay with it.

`python experiments/shipped/rounded.py OUT`, after `make lab`; held against `dev/hass`, which reads the head as it is.
"""

import sys
from functools import partial

from poss_lightning.evaluation import replay

replay.Drafter = partial(replay.Drafter, int8_head=True)
replay.replay(sys.argv[1], "runs/lab/dev", {"hass-rounded": "embedded-hass"})
