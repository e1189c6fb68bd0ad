"""The records of a source, told by what is in it: JSON lines or array, parquet, a folder or hub id of `datasets`."""

import gzip
import io
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_HUB_OPTIONS = ("config", "revision")
_SHOWN = 3  # reasons spelled out, of what is left out

logger = logging.getLogger(__name__)


class CorpusError(ValueError):
    """A corpus that cannot be read as conversations; the message says which and why."""


class Malformed(ValueError):
    """What is wrong with one record."""


def records(source: str, split: str = "train") -> Iterator[tuple[int, object]]:
    """Number, from 1, and content of every record: a line of JSON in bytes, still to be parsed, or the parsed object.

    Args:
        source: a file; a folder of files, or one that `save_to_disk` has written; or a hub id, with options as in
            `ID?config=NAME&revision=COMMIT`.
        split: of a folder or hub id; files have none.

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
    return enumerate(map(_without_nulls, _rows(source, split)), 1)


def stem(source: str) -> str:
    """The name of a source without folders and ending."""
    name = Path(source.partition("?")[0]).name
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def options_of(source: str, *known: str) -> tuple[str, dict[str, str]]:
    """Split `place?name=value&name=value` into the place and its options.

    Raises:
        ValueError: an option that is not known, or has no value.
    """
    place, mark, query = source.partition("?")
    pairs = (option.partition("=") for option in (query.split("&") if mark else ()))
    options = {name: value for name, _, value in pairs}
    for name, value in options.items():
        if name not in known or not value:
            raise ValueError(f"{source!r}: {name!r} is not an option; there are {', '.join(known)}, each NAME=VALUE")
    return place, options


def parse(line: bytes) -> object:
    """The value of a line of JSON.

    Raises:
        Malformed: it is not JSON.
    """
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 text ({error}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({error})") from error


def file_records(path: Path) -> Iterator[tuple[int, object]]:
    """The records of a file, as in `records`: the name does not matter."""
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PAR1":
                yield from enumerate(_parquet(path), 1)
                return
        first = next((line for _, line in _lines(path)), b"").lstrip()
        may_be_whole = first.startswith(b"[") or (first.startswith(b"{") and not _is_json(first))
        whole = _whole(path, first) if may_be_whole else None
        yield from _lines(path) if whole is None else enumerate(whole, 1)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read to its end: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and UTF-8 bytes of every line that is not blank, unpacked where the file is compressed."""
    with path.open("rb") as packed:
        is_gzip = packed.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_gzip else path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
        file.seek(0)
        if encoding == "utf-8":  # bytes: a line that is something else is told by its number
            lines: Iterator[bytes] = iter(file)
        else:
            lines = (line.encode() for line in io.TextIOWrapper(file, encoding, newline="\n"))
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _is_json(line: bytes) -> bool:
    try:
        parse(line)
    except Malformed:
        return False
    return True


def _whole(path: Path, first: bytes) -> list[object] | None:
    """The elements of the one array that a file is, or its one object; None where its lines, as the first, are records.

    Raises:
        CorpusError: it begins as an array, and is not JSON.
    """
    text = b"".join(line for _, line in _lines(path))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if first.startswith(b"[") and not _is_json(first):
            raise CorpusError(f"{path} is not JSON: {error}") from error
        return None  # lines, of which the first is broken
    return content if isinstance(content, list) else [content]


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            yield from map(_without_nulls, batch.to_pylist())
    except ArrowException as error:
        raise CorpusError(f"{path} cannot be read to its end: {error}") from error


def _without_nulls(value: Any) -> Any:
    """A row of a table without the fields that only other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


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
    """Log how many of `total` conversations are left out, with the first reasons.

    Args:
        what: of the message, with {} for their number.

    Raises:
        CorpusError: some are, and `strict`; or more than one is, and more than a tenth.
    """
    if not reasons:
        return
    more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
    message = "\n  ".join([what.format(f"{len(reasons)} of {total}"), *reasons[:_SHOWN], *more])
    if strict or len(reasons) == total or len(reasons) > max(1, total / 10):
        raise CorpusError(message)
    logger.warning("left out, %s", message)
