"""Run notebooks in place, and keep the outputs that make a readable diff: `python notebooks/execute.py [NOTEBOOK …]`.

Texts and figures stay; counters, times, warnings and second forms of an output go. So with the same records a notebook
stays the same file.
"""

import os
import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from poss_lightning.files import atomic

HERE = Path(__file__).resolve().parent
KEPT = ("image/png", "text/plain")  # forms of an output
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(files: list[str]) -> None:
    """Run notebooks, all of this folder by default; one that fails stays as it was."""
    for file in map(Path, files) if files else sorted(HERE.glob("*.ipynb")):
        print(file, flush=True)
        done = stripped(executed(read(file), file.resolve().parent))
        with atomic(file) as path:
            path.write_text(text(done), encoding="utf-8")


def read(file: Path) -> NotebookNode:
    """The notebook in a file."""
    return nbformat.read(file, as_version=4)


def text(notebook: NotebookNode) -> str:
    """The content of a notebook's file."""
    return nbformat.writes(notebook) + "\n"


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook with its outputs, run in `folder` by the interpreter that runs this.

    Raises:
        CellExecutionError: a cell failed; the message has its source and traceback.
    """
    own = KernelSpecManager(kernel_dirs=[])  # no other kernel that is installed under this name
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=own)
    client = NotebookClient(
        notebook,
        km=kernel,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # it warns about unencrypted traffic over loopback
        coalesce_streams=True,  # else printed text is split at random places
        record_timing=False,
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `poss` is
    return client.execute(cleanup_kc=True, env=os.environ | {"PATH": path})  # nbclient keeps a kernel that it was given


def stripped(notebook: NotebookNode) -> NotebookNode:
    """The notebook in the form in which it is committed."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {})
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [_plain(output) for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def _plain(output: NotebookNode) -> NotebookNode:
    output = nbformat.from_dict(output)
    if output.output_type == "execute_result":
        output.execution_count = None
    if "data" in output:
        output.data = nbformat.from_dict({form: output.data[form] for form in KEPT if form in output.data})
        output.metadata = nbformat.from_dict({})
    return output


if __name__ == "__main__":
    main(sys.argv[1:])
