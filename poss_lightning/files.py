"""Files: written completely or not at all; read, and found, here or on the hub.

Nothing that this package did not write is ever removed. What is being written has the name `.poss.XXXXXXXX.NAME.tmp`
beside NAME; a killed command leaves it, and anyone may remove it.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

TEMPORARY = ".poss."  # how the names of what is being written begin


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file, which becomes `path`, on disk, when the block ends without an error."""
    path = Path(path)
    with _temporary(path) as temporary, _name_full_disk(path, temporary):
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        temporary.chmod(mode)  # the user's umask; some writers leave a file that only they may read
        _sync(temporary)
        os.replace(temporary, path)
    _sync(path.parent)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `path`, on disk, when the block ends without an error.

    Raises:
        FileExistsError: `path` exists.
    """
    path = Path(path)
    check_new(path)
    with _temporary(path) as temporary:
        temporary.mkdir()
        with _name_full_disk(path, temporary / "rest"):
            yield temporary
            for written in [*temporary.rglob("*"), temporary]:
                if written.is_file():
                    written.chmod(temporary.stat().st_mode & 0o666)
                _sync(written)
        try:
            temporary.rename(path)
        except OSError:
            check_new(path)  # of two processes the first to finish has it
            raise
    _sync(path.parent)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a new name beside `path`, and remove what has that name in the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}.{path.name}.tmp")
    try:
        yield temporary
    finally:
        _discard(temporary)


def _discard(temporary: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def remove(folder: Path, *names: str) -> None:
    """Delete files matching `names`, then the folder if it is empty."""
    for path in (path for name in names for path in folder.glob(name)):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk: they survive a power cut."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # another process has finished the work in this folder, and removed it
        return
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # not every file system can sync a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _name_full_disk(path: Path, temporary: Path) -> Iterator[None]:
    """Turn the error of a writing library into an OSError that names `path`, if the disk is full.

    Not every library says why it failed, so one more write asks the file system.
    """
    try:
        yield
    except Exception as error:
        try:
            with temporary.open("ab") as file:
                file.write(bytes(2**20))
        except OSError as refused:
            raise OSError(refused.errno, os.strerror(refused.errno or 0), str(path)) from error
        raise


def check_new(path: str | Path) -> None:
    """Raise FileExistsError if `path` exists; other errors as `check_name`."""
    if check_name(path):
        raise FileExistsError(f"{path} already exists: choose a different name, or remove it")


def check_file(path: str | Path, *endings: str) -> None:
    """Refuse a path where no file may be written; an existing file may be.

    Raises:
        IsADirectoryError: it is a folder.
        OSError, ValueError: as `check_name`; or the name has none of the endings.
    """
    check_name(path)
    name = Path(path).name
    if not any(name.endswith(ending) and name != ending for ending in endings):
        raise ValueError(f"out is {path}; its name must end in {' or '.join(endings)}")
    if Path(path).is_dir():
        raise IsADirectoryError(
            f"{path} is a folder: name a file in it, for example {Path(path) / ('my' + endings[0])}"
        )


def check_folder(path: str | Path, *ours: str) -> None:
    """Refuse a path where no folder may be written; it may be new, empty, or one to resume.

    Args:
        path: of the folder.
        ours: names, one of which is in every folder that the same command has begun: a file, or a folder of `Work`.

    Raises:
        FileExistsError: it is a file, or a folder with other files.
        OSError, ValueError: as `check_name`.
    """
    if not check_name(path):
        return
    if not Path(path).is_dir():
        raise FileExistsError(f"{path} is a file: name a folder")
    # In this order, as another process may finish it meanwhile.
    others = any(not name.startswith(TEMPORARY) for name in os.listdir(path))
    if others and not any((Path(path) / name).exists() for name in ours):
        raise FileExistsError(f"{path} is not empty and holds nothing to resume: choose another folder")


def check_name(path: str | Path) -> bool:
    """Whether `path` exists.

    Raises:
        ValueError: the name is empty.
        OSError: the name is too long, or below a file; or permission is missing.
    """
    if not str(path).strip():
        raise ValueError(f"out is {str(path)!r}; it must be the name of what to write")
    try:
        os.lstat(path)
        return True
    except FileNotFoundError:
        nearest = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise PermissionError(f"{path} cannot be written: {nearest} is not yours to write")
    return False


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file; ValueError, naming the file, if it is not one."""
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:  # also of bytes that are not UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is a {type(content).__name__}; it must be a JSON object")
    return content


def sha256(path: str | Path) -> str:
    """Return the hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def user_cache() -> Path:
    """Return the folder of large files that are kept between runs: POSS_CACHE, or ~/.cache/poss_lightning."""
    return Path(os.environ.get("POSS_CACHE", Path.home() / ".cache" / "poss_lightning"))


def conf(name: str) -> Path:
    """Return a file of conf/, which is beside the package in a checkout, and inside it in a wheel."""
    package = Path(str(files("poss_lightning")))
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name}: no such file, nor one of that name in the package, which `poss list` shows")


def conf_names() -> list[str]:
    """List all files of conf/, those in its folders first."""
    folder = conf("demo.yaml").parent
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return sorted(names, key=lambda name: ("/" not in name, name))


def find_config(name: str) -> str:
    """The YAML file of that path, or else of that name in conf/. Raises FileNotFoundError if there is neither."""
    return name if Path(name).is_file() else str(conf(name.removeprefix("conf/")))


def fetch(source: str, what: str, patterns: list[str], otherwise: str = "") -> Path:
    """Return a local folder, or that of a hub id after the download of files with these patterns.

    Raises:
        FileNotFoundError: `source` is neither; the message begins with `what`, gives the hub's reason, and ends with
            `otherwise`.
    """
    from huggingface_hub import snapshot_download  # `poss --help` does not wait for it

    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # what the hub client's many kinds derive from
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise FileNotFoundError(
            f"{what} {source!r} is neither a local folder nor a hub id that can be reached ({reason}){otherwise}"
        ) from error


def public_name(path: str | Path) -> str:
    """Return a path as it is below the current folder, and elsewhere its last name alone: a page may be published."""
    inside = os.path.relpath(path)
    return os.path.basename(os.path.abspath(path)) if inside.startswith("..") else inside
