"""The records of a source, by its content: JSON lines or an array, parquet, a folder or hub id of `datasets`."""

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
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
    return enumerate(_rows(source, split), 1)


def stem(source: str) -> str:
    """Return the name of a source without folders and ending."""
    name = Path(source.partition("?")[0]).name
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def options_of(source: str, *names: str) -> tuple[str, dict[str, str]]:
    """Split `NAME?option=value&option=value` into name and options; ValueError for an unknown option or no value."""
    path, mark, query = source.partition("?")
    pairs = (option.partition("=") for option in (query.split("&") if mark else ()))
    options = {name: value for name, _, value in pairs}
    for name, value in options.items():
        if name not in names or not value:
            raise ValueError(f"{source!r}: {name!r} is not an option; there are {', '.join(names)}, each NAME=VALUE")
    return path, options


def unique_name(name: str, used: dict[str, int]) -> str:
    """Return the name, with `#2`, `#3`, … if it is taken; `used` holds the last number of each name."""
    free = name
    while free in used:
        used[name] += 1
        free = f"{name}#{used[name]}"
    used[free] = 1
    return free


def parse_line(line: bytes) -> Any:
    """Parse JSON, NaN as null, as pandas writes an empty cell; Malformed if it is not JSON of texts."""
    try:
        value = json.loads(line, parse_constant=lambda name: None)
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise Malformed("it holds half a surrogate pair, which is not text") from error
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 text ({error}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({error})") from error


def file_records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the records of a file as `records` does, whatever its name.

    The elements of a file that is one JSON array are its records, or the one object; otherwise each line is one.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(4)
        if begin == b"PAR1":
            yield from enumerate(_parquet(path), 1)
            return
        with gzip.open(path, "rb") if begin.startswith(b"\x1f\x8b") else path.open("rb") as file:
            first, second = [*islice(filter(bytes.strip, file), 2), b"", b""][:2]
            begin = first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            if begin not in (b"{", b"[", b"") and not _is_json(first):
                raise CorpusError(f"{path} is not UTF-8 JSON, lines or an array, nor parquet; only gzip may pack it")
            file.seek(0)
            yield from _lines(file) if second and _is_json(first) else _values(path, file, first)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} cannot be read to its end: {error}") from error


def _lines(file: BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _values(path: Path, file: BufferedIOBase, first: bytes) -> Iterator[tuple[int, object]]:
    """Yield the elements of a file of one value; or its lines, if the first is malformed."""
    try:
        value = parse_line(file.read() or b"[]")
    except Malformed as error:
        if first.lstrip().startswith(b"["):
            raise CorpusError(f"{path} is {error}") from error
        file.seek(0)
        return _lines(file)
    return enumerate(value if isinstance(value, list) else [value], 1)


def _is_json(line: bytes) -> bool:
    with suppress(Malformed):
        parse_line(line)
        return True
    return False


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
        always = ("content", "value") if {"role", "from"} & value.keys() else ()
        fields = [(key, part) for key, part in value.items() if key in always or (part is not None and part == part)]
        return {key: without_nulls(part) for key, part in fields}  # NaN does not equal itself
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _rows(source: str, split: str) -> Iterator[object]:
    """Yield the records of a data set: of JSON and parquet files those of the files, as a table would retype them."""
    import datasets  # takes a second, and files do without it
    from datasets.exceptions import DatasetsError

    name, options = (source, {}) if Path(source).exists() else options_of(source, "config", "revision")
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "dataset_info.json")):
            saved = datasets.load_from_disk(name)
            return map(without_nulls, saved[split] if isinstance(saved, datasets.DatasetDict) else saved)
        builder = datasets.load_dataset_builder(name, options.get("config"), revision=options.get("revision"))
        files = (builder.config.data_files or {}).get(split)
        if files and type(builder).__module__.endswith((".json", ".parquet")):
            paths = map(Path, datasets.DownloadManager().download(list(files)))
            return (record for path in paths for _, record in file_records(path))
        rows = datasets.load_dataset(name, options.get("config"), split=split, revision=options.get("revision"))
        return map(without_nulls, rows)
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
