"""The records of a source, by its content: JSON lines or an array, parquet, a folder or hub id of `datasets`."""

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".tsv")
TABLES = {"csv": ",", "tsv": "\t"}  # by ending, as their content does not tell them
PACKED = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ": lzma.open, b"BZh": bz2.open}  # by how a file begins
_ARROW = "an Arrow file: name the folder of its data set"
REFUSED = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it",
    b"ARROW1": _ARROW,
    b"\xff\xff\xff\xff": _ARROW,  # a stream, as `datasets` writes it
}
_HUB_OPTIONS = ("config", "revision")
_JSON = json.JSONDecoder(parse_constant=lambda name: None)  # NaN, pandas' empty cell, is null
_SHOWN = 3  # reasons for leaving records out that a message spells out

logger = logging.getLogger(__name__)


class CorpusError(ValueError):
    """A corpus that cannot be read as conversations."""


class Malformed(ValueError):
    """What is wrong with one record."""


def records(source: str, split: str = "train") -> Iterator[tuple[int, object]]:
    """Yield each record's number, from 1, and content: an unparsed line of JSON in bytes, or the parsed object.

    Args:
        source: a file; a folder of files, or one that `save_to_disk` has written; or a hub id, with options as in
            `ID?config=NAME&revision=COMMIT`.
        split: part of a folder or hub id; files have none.

    Raises:
        CorpusError: no such source, or it cannot be read.
    """
    if not source.strip():
        raise CorpusError(f"corpus is {source!r}; it must be a file, a folder or a hub id")
    path = Path(source)
    if path.is_file():
        return file_records(path)
    if path.name.endswith(ENDINGS):
        raise CorpusError(f"{source} is missing: there is no such file")
    return enumerate(map(without_nulls, _rows(source, split)), 1)


def stem(source: str) -> str:
    """Return the name of a source without folders and ending."""
    name = Path(source.partition("?")[0]).name
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def options_of(source: str, *known: str) -> tuple[str, dict[str, str]]:
    """Split `place?name=value&name=value` into place and options; ValueError for an unknown option or no value."""
    place, mark, query = source.partition("?")
    pairs = (option.partition("=") for option in (query.split("&") if mark else ()))
    options = {name: value for name, _, value in pairs}
    for name, value in options.items():
        if name not in known or not value:
            raise ValueError(f"{source!r}: {name!r} is not an option; there are {', '.join(known)}, each NAME=VALUE")
    return place, options


def unused(name: str, used: dict[str, int]) -> str:
    """Return the name, with `#2`, `#3`, … if it is taken; `used` holds the last number of each name."""
    found = name
    while found in used:
        used[name] += 1
        found = f"{name}#{used[name]}"
    used[found] = 1
    return found


def parse_line(line: bytes) -> object:
    """Parse a line of JSON; Malformed if it is not JSON."""
    try:
        return json.loads(line, parse_constant=_JSON.parse_constant)
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 text ({error}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({error})") from error


def file_records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the records of a file as `records` does, whatever its name."""
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PAR1":
                yield from enumerate(_parquet(path), 1)
                return
        if delimiter := TABLES.get(path.name.removesuffix(".gz").rpartition(".")[2]):
            csv.field_size_limit(2**31 - 1)  # letters of a cell, which may hold a chat
            text = (line.decode() for _, line in lines(path, blank=True))
            yield from enumerate(csv.DictReader(text, delimiter=delimiter), 1)
            return
        elements = _elements(path)
        yield from lines(path) if elements is None else enumerate(elements, 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise CorpusError(f"{path} cannot be read to its end: {error}") from error


def lines(path: Path, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and UTF-8 bytes of each line of a possibly compressed file; blank ones if `blank`.

    Raises:
        CorpusError: it is of a kind that is not read.
    """
    with path.open("rb") as packed:
        begin = packed.read(6)
    if kind := next((kind for magic, kind in REFUSED.items() if begin.startswith(magic)), None):
        raise CorpusError(f"{path} is {kind}")
    unpack = next((unpack for magic, unpack in PACKED.items() if begin.startswith(magic)), open)
    with unpack(path, "rb") as file:
        encoding = json.detect_encoding(file.read(4))
        file.seek(0)
        if encoding == "utf-8":  # as bytes, so that an error names the line that is not UTF-8
            found: Iterator[bytes] = iter(file)
        else:
            found = (line.encode() for line in io.TextIOWrapper(file, encoding, newline="\n"))
        yield from ((number, line) for number, line in enumerate(found, 1) if blank or line.strip())


def _elements(path: Path) -> list[Any] | None:
    """Parse a file of one array or of multi-line values; None if its lines are records.

    Raises:
        CorpusError: it begins as an array or as a value of several lines, and is not JSON.
    """
    first = next((line for _, line in lines(path)), b"").lstrip()
    is_array = first.startswith(b"[")
    if not is_array and (not first.startswith(b"{") or _is_json(first)):
        return None
    text, end, found = "", 0, []
    try:
        text = b"".join(line for _, line in lines(path)).decode(errors="surrogatepass")
        while begin := re.compile(r"\S").search(text, end):
            value, end = _JSON.raw_decode(text, begin.start())
            found.append(value)
    except (ValueError, RecursionError) as error:
        if (is_array or "\n" in text[:end]) and not _is_json(first):
            raise CorpusError(f"{path} is not JSON: {error}") from error
        return None  # lines, of which the first is malformed
    if is_array and len(found) == 1:
        return found[0]
    return None if is_array and _is_json(first) else found


def _is_json(line: bytes) -> bool:
    try:
        parse_line(line)
    except Malformed:
        return False
    return True


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            yield from map(without_nulls, batch.to_pylist())
    except ArrowException as error:
        raise CorpusError(f"{path} cannot be read to its end: {error}") from error


def without_nulls(value: Any) -> Any:
    """Drop the null fields that a table adds where only other rows have values; a turn's content stays."""
    if isinstance(value, dict):
        kept = ("content", "value") if {"role", "from"} & value.keys() else ()
        given = [(key, part) for key, part in value.items() if key in kept or (part is not None and part == part)]
        return {key: without_nulls(part) for key, part in given}  # NaN does not equal itself
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _rows(source: str, split: str) -> Any:
    import datasets  # takes a second, and files do without it
    from datasets.exceptions import DatasetsError

    name, options = (source, {}) if Path(source).exists() else options_of(source, *_HUB_OPTIONS)
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "dataset_info.json")):
            saved = datasets.load_from_disk(name)
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(name, options.get("config"), split=split, revision=options.get("revision"))
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, DatasetsError) as error:
        fault = "a folder datasets cannot load" if Path(name).is_dir() else "no path here and no reachable hub id"
        raise CorpusError(f"{source} is {fault} (split {split!r}): {error.__cause__ or error}") from error


def report_left_out(what: str, reasons: list[str], total: int, strict: bool) -> None:
    """Log how many of `total` conversations are left out and the first reasons; `what` has {} for the number.

    Raises:
        CorpusError: any is left out, and `strict`; or all are, or more than one is and more than a tenth.
    """
    if not reasons:
        return
    more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
    message = "\n  ".join([what.format(f"{len(reasons)} of {total}"), *reasons[:_SHOWN], *more])
    if strict or len(reasons) == total or len(reasons) > max(1, total / 10):
        raise CorpusError(message)
    logger.warning("left out, %s", message)
