"""Files: written so that none is ever half-written, a temporary name first; found, here or on the hub."""

import errno
import glob
import hashlib
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path, PureWindowsPath
from tempfile import TemporaryFile
from typing import Any

HOST = socket.gethostname()
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, a quota, a limit on files


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it becomes `path`, else it is removed.

    Its name is always the same on a machine, so that what a killed process left is overwritten by the one that goes on.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with _full_disk_named(path, temporary):
            yield temporary
            temporary.chmod(0o644)  # some writers leave a file that only they may read
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`; when the block ends well it becomes `path`, else it is removed.

    Its name has the process in it, so that what a killed one left is told from what another is writing.

    Raises:
        FileExistsError: there is something at `path`.
        ValueError: another process is writing it.
    """
    path = Path(path)
    check_new(path)
    temporary = temporary_path(path, os.getpid())
    for other in path.parent.glob(glob.escape(temporary_path(path).stem) + ".*.tmp"):
        if _is_alive(other):
            raise ValueError(f"{path}: another process writes there; wait for it, or choose another name")
        shutil.rmtree(other, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with _full_disk_named(path, temporary / "rest"):
            yield temporary
        check_new(path)  # of two that began at once the first to end has it
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_path(path: Path, process: int | None = None) -> Path:
    """With the machine's name: not every file system that several machines share lets them lock each other out."""
    return path.with_name(f".{path.name}.{HOST}{'' if process is None else f'.{process}'}.tmp")


def _is_alive(temporary: Path) -> bool:
    """Whether the process that a temporary folder is named after still runs, and is another."""
    number = temporary.suffixes[-2].removeprefix(".")
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextmanager
def _full_disk_named(path: Path, temporary: Path) -> Iterator[None]:
    """Where the disk is full, let it be an OSError that names `path`, whatever the library says that writes.

    Each has errors of its own, of which some do not tell why. So the file system is asked, by writing on.
    """
    try:
        yield
    except Exception as error:
        full = error
        if not isinstance(error, OSError):
            try:
                with temporary.open("ab") as file:
                    file.write(bytes(2**20))
            except OSError as refused:
                full = refused
        if not isinstance(full, OSError) or full.errno not in FULL:
            raise
        raise OSError(full.errno, os.strerror(full.errno), str(path)) from error


def check_new(path: str | Path) -> None:
    """Raise FileExistsError where there is something at `path`; other errors as of `check_name`."""
    if check_name(path):
        raise FileExistsError(f"{path} is there already: choose another name or remove it")


def check_file(path: str | Path, *endings: str) -> None:
    """Whether a file may be written at `path`, over another one or not.

    Raises:
        IsADirectoryError: a folder is there.
        OSError, ValueError: as of `check_name`; or the name has none of the endings.
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
    """Whether a folder may be written at `path`: a new one, an empty one, or one to go on with.

    Args:
        path: of the folder.
        ours: names, one of which is in every folder that the same command has begun.

    Raises:
        FileExistsError: a file is there, or a folder with files of others.
        OSError, ValueError: as of `check_name`.
    """
    if not check_name(path):
        return
    if not Path(path).is_dir():
        raise FileExistsError(f"{path} is a file: name a folder")
    # In this order: another process may finish it meanwhile.
    if any(Path(path).iterdir()) and not any((Path(path) / name).exists() for name in ours):
        raise FileExistsError(f"{path} is not empty, and nothing to go on with: choose another folder")


def check_name(path: str | Path) -> bool:
    """Whether there is something at `path`, a name under which something may be written.

    Raises:
        ValueError: the name is empty.
        OSError: there can be nothing of that name: it is too long, or below a file; or it may not be written.
    """
    if not str(path).strip():
        raise ValueError(f"out is {str(path)!r}; it must be the name of what to write")
    try:
        os.lstat(path)
        return True
    except FileNotFoundError:
        nearest = next(parent for parent in Path(path).absolute().parents if parent.exists())
    try:
        TemporaryFile(dir=nearest).close()  # permissions do not tell: root has all of them, in /proc too
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise PermissionError(f"{path} cannot be written: {nearest} is not yours to write") from error
    return False


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or no object; the message names the file.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:  # of bytes that are not UTF-8 too
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is a {type(content).__name__}; it must be a JSON object")
    return content


def sha256(path: str | Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Hashed(io.BufferedWriter):
    """A new file whose digest is known when it is written, without reading it again."""

    def __init__(self, path: str | Path):
        super().__init__(io.FileIO(path, "w"))
        self._digest = hashlib.sha256()

    def write(self, data) -> int:
        self._digest.update(data)
        return super().write(data)

    def sha256(self) -> str:
        """Hex digest of all that was written so far."""
        return self._digest.hexdigest()


def user_cache() -> Path:
    """Where large files are kept between runs: POSS_CACHE, or ~/.cache/poss_lightning."""
    return Path(os.environ.get("POSS_CACHE", Path.home() / ".cache" / "poss_lightning"))


def conf(name: str) -> Path:
    """A file of conf/: beside the package in a checkout, inside it where it was installed from a wheel."""
    package = Path(str(files("poss_lightning")))
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"conf/{name} is neither in {package} nor beside it")


def conf_names() -> list[str]:
    """Names of all files of conf/, those in its folders first."""
    folder = conf("demo.yaml").parent
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return sorted(names, key=lambda name: ("/" not in name, name))


def find_config(name: str) -> str:
    """The YAML file of that path, or else of that name in conf/, which may stand before it.

    Raises:
        FileNotFoundError: neither.
    """
    return name if Path(name).is_file() else str(conf(name.removeprefix("conf/")))


def fetch(source: str, what: str, patterns: list[str], otherwise: str = "") -> Path:
    """A local folder, or a hub id's after its download.

    Args:
        what: it should be, for the message; as `otherwise`, which follows.
        patterns: of the files to download.

    Raises:
        FileNotFoundError: neither; the message has the hub's own reason.
    """
    from huggingface_hub import snapshot_download  # `poss --help` need not wait for it

    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # what the hub client's many kinds derive from
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise FileNotFoundError(
            f"{what} {source!r} is neither a local folder nor a hub id that can be reached ({reason}){otherwise}"
        ) from error


# --- how files of others, and addresses, are written down ---

URL = re.compile(r"([a-zA-Z][\w+.-]*://)([^\s'\"<>]*)")


def without_secrets(text: str) -> str:
    """The text with no user, password or query in its addresses: `s3://KEY:SECRET@bucket/a` becomes `s3://bucket/a`."""

    def strip(match: re.Match[str]) -> str:
        protocol, rest = match.groups()
        host = rest.partition("/")[0]
        if protocol != "hf://" and ("@" in host or re.search(r":(?!\d*$)", host)):  # a secret may itself have a slash
            rest = rest.rpartition("@")[2]
        return protocol + re.split("[?#]", rest, maxsplit=1)[0]

    return URL.sub(strip, text)


def public_name(address: str | Path) -> str:
    """An address or path as strangers may read it: without secrets, and of a path outside this folder its last name."""
    text = without_secrets(str(address))
    if "://" in text and not text.startswith(("file://", "local://")):
        return text
    text = text.partition("://")[2] or text
    if re.match(r"[a-zA-Z]:|.*\\", text):
        return PureWindowsPath(text).name or "folder"
    inside = os.path.relpath(text) if os.path.isabs(text) else os.path.normpath(text)
    if inside.startswith(("..", "~")):
        return Path(inside).name if Path(inside).name.strip(".~") else "folder"
    return inside
