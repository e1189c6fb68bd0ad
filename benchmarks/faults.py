"""Every command that writes: killed at each of its file operations, on a full disk, beside a second writer; resumed.

    python -m benchmarks.faults --minutes 10        all in turn, each command as long as the others
    python -m benchmarks.faults extract kill:17     one case again

What a command leaves in the end must be what it leaves when nothing happens, byte by byte. `tests/support/faults.py`
says what may happen, `tests/support/writers.py` which commands there are and what in their files depends on the time.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tqdm import tqdm

from tests.support.faults import CREATES, Fault
from tests.support.writers import WRITERS, Observed, Place, Writer


@dataclass
class Trials:
    """What is tried of one command."""

    name: str
    writer: Writer
    whole: dict[str, object]  # what it leaves when nothing happens
    planned: list[Fault]
    left: list[Fault]
    seconds: float = 0.0

    def __str__(self) -> str:
        planned, left = (Counter(fault.kind for fault in faults) for faults in (self.planned, self.left))
        kinds = [f"{kind} {count - left[kind]}/{count}" for kind, count in sorted(planned.items())]
        return f"{self.name:<12} {', '.join(kinds)}"


def plan(seen: Observed) -> list[Fault]:
    """Every fault at every file operation."""
    operations = list(enumerate(seen.operations, 1))
    appended = {number for (_, before), (number, here) in pairwise(operations) if before == here}  # line by line
    moments = [number for number, _ in operations if number not in appended]
    written = [
        number
        for (_, before), (number, here) in pairwise(operations)
        if number not in appended and (here.event == "os.chmod" or before.event == "open")
    ]
    faults = [Fault("kill", number) for number in moments] + [Fault("torn", number) for number in written]
    faults += [Fault("full", number) for number in moments if seen.operations[number - 1].event in CREATES]
    faults += [Fault(kind, number) for kind in ("beside", "foreign") for number in moments]
    return faults + [Fault("limit", size) for size in sorted({0, *(size // 2 for size in seen.sizes)})]


def soak(minutes: float, names: list[str], seed: int, place: Place) -> tuple[list[Trials], list[str]]:
    """Try cases until the time is over or none is left, next of the command that has had the least of it.

    Returns also what failed.
    """
    random, wrong = Random(seed), []
    with tqdm(total=round(60 * minutes), unit="s", desc="faults", mininterval=1 if sys.stderr.isatty() else 60) as bar:
        trials = []
        for name in names:
            seen = place.observe(WRITERS[name])
            faults = plan(seen)
            trials.append(Trials(name, WRITERS[name], seen.whole, faults, random.sample(faults, len(faults))))
        began = time.monotonic()  # else a short run would try nothing
        while (elapsed := time.monotonic() - began) < 60 * minutes and any(one.left for one in trials):
            bar.update(min(round(elapsed), bar.total) - bar.n)
            one = min((one for one in trials if one.left), key=lambda one: one.seconds)
            fault, start = one.left.pop(), time.monotonic()
            bar.set_postfix_str(f"{len(wrong)} wrong, {one.name} {fault}", refresh=False)
            if problem := place.check(one.writer, fault, one.whole):
                wrong.append(f"python -m benchmarks.faults {one.name} {fault}\n    {problem}")
                bar.write(wrong[-1], file=sys.stderr)
            one.seconds += time.monotonic() - start
    return trials, wrong


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=WRITERS, help="only this one")
    parser.add_argument("fault", nargs="?", type=Fault.parse, help="only this one, as KIND:AT")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args(arguments)
    names = [options.command] if options.command else list(WRITERS)
    with TemporaryDirectory(prefix="poss-faults-") as folder:
        place = Place(Path(folder))
        if options.fault:
            writer = WRITERS[options.command]
            sys.exit(place.check(writer, options.fault, place.observe(writer).whole))
        trials, wrong = soak(options.minutes, names, options.seed, place)
    print(*(f"  {one}" for one in trials), sep="\n")
    print(f"  {sum(len(one.planned) - len(one.left) for one in trials)} cases, {len(wrong)} wrong")
    if wrong:
        sys.exit("\n".join(["these went wrong:", *wrong]))


if __name__ == "__main__":
    main()
