"""Every command that writes, killed at each of its file operations, on a full disk, beside a second writer; goes on.

    python -m benchmarks.faults --minutes 10        all in turn, each command as long as the others
    python -m benchmarks.faults extract kill:17     one case again

What a command leaves in the end must be what it leaves when nothing happens, byte by byte; `tests/support/faults.py`
says what may happen, `tests/support/writers.py` which commands there are and what of their files tells the time. When
every case of every command was tried, processes are killed at random moments until the time is over.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tqdm import tqdm

from tests.support.faults import CREATES, Fault
from tests.support.writers import WRITERS, Observed, Place, Writer


def plan(writer: Writer, seen: Observed) -> list[Fault]:
    """Every fault that can be counted."""
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
    if writer.processes == 1:
        faults += [Fault("limit", size) for size in sorted({0, *(size // 2 for size in seen.sizes)})]
    return faults


def cases(seconds: float, faults: list[Fault], random: Random) -> Iterator[Fault]:
    """The planned ones, then kills at random moments of a command that takes so many seconds."""
    yield from random.sample(faults, len(faults))
    while True:
        yield Fault("time", round(random.uniform(0, 1.1 * seconds), 3))


def soak(minutes: float, names: list[str], seed: int, place: Place) -> tuple[list[str], dict[str, Counter], dict]:
    """Try cases until the time is over, the next always of the command that has had the least of it.

    Returns:
        What went wrong; by command and kind how many cases there were, and how many were planned.
    """
    random, wrong = Random(seed), []
    seen, coming, spent, planned = {}, {}, {}, {}
    tried: dict[str, Counter] = {name: Counter() for name in names}
    with tqdm(total=round(60 * minutes), unit="s", desc="faults", mininterval=1 if sys.stderr.isatty() else 60) as bar:
        for name in names:
            start = time.monotonic()
            seen[name] = place.observe(WRITERS[name])
            faults = plan(WRITERS[name], seen[name])
            planned[name] = Counter(fault.kind for fault in faults)
            coming[name], spent[name] = cases(time.monotonic() - start, faults, random), 0.0
        began = time.monotonic()  # else a short run would try nothing
        while (elapsed := time.monotonic() - began) < 60 * minutes:
            bar.update(min(round(elapsed), bar.total) - bar.n)
            unfinished = [name for name in names if not planned[name] or tried[name].total() < planned[name].total()]
            name = min(unfinished or names, key=spent.__getitem__)
            fault, start = next(coming[name]), time.monotonic()
            bar.set_postfix_str(
                f"{sum(map(Counter.total, tried.values()))} cases, {len(wrong)} wrong, {name} {fault}", refresh=False
            )
            if problem := place.check(WRITERS[name], fault, seen[name].whole):
                wrong.append(f"python -m benchmarks.faults {name} {fault}\n    {problem}")
                bar.write(wrong[-1], file=sys.stderr)
            spent[name] += time.monotonic() - start
            tried[name][fault.kind] += 1
    return wrong, tried, planned


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=WRITERS, help="only this one")
    parser.add_argument("fault", nargs="?", type=Fault.parse, help="only this one, as KIND:AT")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the order and of random moments")
    options = parser.parse_args(arguments)
    names = [options.command] if options.command else list(WRITERS)
    with TemporaryDirectory(prefix="poss-faults-") as folder:
        place = Place(Path(folder))
        if options.fault:
            writer = WRITERS[options.command]
            sys.exit(place.check(writer, options.fault, place.observe(writer).whole))
        wrong, tried, planned = soak(options.minutes, names, options.seed, place)
    for name in names:
        kinds = [f"{kind} {count}/{planned[name][kind] or count}" for kind, count in sorted(tried[name].items())]
        print(f"  {name:<12} {', '.join(kinds)}")
    print(f"  {sum(map(Counter.total, tried.values()))} cases, {len(wrong)} wrong")
    if wrong:
        sys.exit("\n".join(["these went wrong:", *wrong]))


if __name__ == "__main__":
    main()
