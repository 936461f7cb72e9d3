"""Real commands whose calls that change the disk are counted, and killed or refused at one of them.

The commands run in processes forked from one that has imported all of them, beneath `tests/faults/faulty_disk.c`: a
trial costs what the command's own work costs.
"""

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Self

import pytest

SOURCE = Path(__file__).parents[1] / "faults" / "faulty_disk.c"
NEEDS_COMPILER = pytest.mark.skipif(
    not shutil.which("gcc"), reason="needs a C compiler to let calls of a program fail"
)
MAINS = {"silo": "silo.cli", "aggregator": "aggregator.cli", "ddm": "ddm.cli.main"}


def build_library(folder: Path) -> Path:
    """Compile the library that counts calls and lets them fail."""
    built = folder / "faulty_disk.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", built, SOURCE, "-ldl"], check=True)
    return built


@dataclass(frozen=True)
class Fault:
    """What happens at one call.

    Attributes:
        below: folders in which calls are counted.
        at: the number of the call, from 1; 0 only counts.
        full: while this file exists the disk is full from that call on; None kills the process there.
    """

    below: Sequence[Path]
    at: int = 0
    full: Path | None = None

    def environment(self, count: Path) -> dict[str, str]:
        """Return the variables that tell the library of it; calls are counted in the file `count`."""
        variables = {
            "FAULT_BELOW": ":".join(map(str, self.below)),
            "FAULT_COUNT": str(count),
            "FAULT_AT": str(self.at),
        }
        if self.full:
            variables["FAULT_FULL"] = str(self.full)
        return variables


def read_call_count(count: Path) -> int:
    """Return how many calls were made; a command that makes none writes no file."""
    if not count.exists():
        return 0
    return int.from_bytes(count.read_bytes(), sys.byteorder)


@dataclass(frozen=True)
class CommandExit:
    """How a command ended.

    Attributes:
        code: its exit code, or minus the signal that ended it.
        output: all that it wrote on standard output and standard error.
        num_calls: its calls that change the disk.
    """

    code: int
    output: str
    num_calls: int


class CommandServer:
    """Runs commands, one at a time, in forks of one process that has imported all of them.

    Args:
        folder: where the library and what commands say are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **os.environ,
            "LD_PRELOAD": str(build_library(folder)),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.support.faulty_disk"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, *words: object, fault: Fault | None = None) -> CommandExit:
        """Run one command to its end.

        Args:
            words: program and arguments.
            fault: what happens to it.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        count = self._folder / "count"
        output = self._folder / "output"
        count.unlink(missing_ok=True)
        environment = fault.environment(count) if fault else {}
        request = {
            "words": [str(word) for word in words],
            "environment": environment,
            "output": str(output),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that runs commands has ended"
        return CommandExit(int(answer), output.read_text(errors="replace"), read_call_count(count))


def serve() -> None:
    """Answer each line of standard input, a command, with its exit code, from a process forked for it."""
    for name in MAINS.values():
        import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        imported = Path(request["output"]).with_name("imported")
        pid = os.fork()
        if not pid:
            _run_in_fork(
                request["words"], request["environment"], Path(request["output"]), imported
            )
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if imported.exists():  # what one command imported, the next finds there
            for name in imported.read_text().split():
                with suppress(ImportError):
                    import_module(name)
            imported.unlink()
        print(code, flush=True)


def _run_in_fork(
    words: Sequence[str], environment: Mapping[str, str], output: Path, imported: Path
) -> None:
    code = 1
    try:
        said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        sys.argv = list(words)
        os.environ.update(environment)
        sys.modules[MAINS[words[0]]].main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
        if not code:
            imported.write_text("\n".join(sys.modules))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
