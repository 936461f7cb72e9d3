"""Runs the cells of a notebook in one IPython shell, as Jupyter runs them, without its server and its sockets.

    python -m tests.support.notebook NOTEBOOK

The last line of the output is JSON: for each cell of code the MIME types of what it displayed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config


class RecordingDisplayHook(DisplayHook):
    """Records the value of a cell's last line, in all forms that a notebook could show."""

    def write_output_prompt(self) -> None:
        """Print no number before a value."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        """Record one value."""
        self.shell.display_pub.publish(format_dict)


class RecordingShell(InteractiveShell):
    """A shell that records what is displayed."""

    displayhook_class = Type(RecordingDisplayHook)
    display_pub_class = Type(CapturingDisplayPublisher)


def read_cells(notebook: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text("utf-8"))["cells"]
    return cells


def run_notebook(notebook: Path) -> list[list[str]]:
    """Run every cell of code; return the MIME types that each displayed.

    Raises:
        RuntimeError: a command ended with an exit code that is not 0.
        Exception: what a cell raised.
    """
    # Without the history of what a person typed, which is a file in the home folder.
    config = Config({"HistoryManager": {"enabled": False}})
    shell = RecordingShell.instance(config=config)
    displayed = []
    for cell in read_cells(notebook):
        if cell["cell_type"] != "code":
            continue
        shell.display_pub.outputs.clear()
        shell.run_cell("".join(cell["source"]), store_history=True).raise_error()
        # IPython goes on after a command of the shell that failed.
        if shell.user_ns.get("_exit_code", 0) != 0:
            raise RuntimeError(f"a command of cell {cell['id']} failed")
        displayed.append([name for shown in shell.display_pub.outputs for name in shown["data"]])
    return displayed


if __name__ == "__main__":
    print(json.dumps(run_notebook(Path(sys.argv[1]))))
