"""All figures of the diffusion core in one run: `make bench`.

Each benchmark runs in a process of its own, one after the other, and prints its measurements; figures with a target go
to build/bench/targets.csv, written at the end, and into one picture, targets.png. A benchmark that fails is named, and
the others continue; the exit status is then 1. A missed target is not a failure: it is listed in the table.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

from support.plot import draw
from support.targets import write_rows

HERE = Path(__file__).parent
CORE = ("dit", "sampling", "masking", "training_loop", "memory", "assignment", "precision")


def main() -> int:
    """Command line: --only NAME ... --quick --out FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=CORE, default=CORE, help="benchmarks to run; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, for a quick trial")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    folder = arguments.out / "targets"
    for old in folder.glob("*.csv"):
        old.unlink()
    failed = []
    for name in arguments.only:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(arguments.out)]
        completed = subprocess.run(
            [*command, *(["--quick"] if arguments.quick else [])], check=False
        )
        print(f"== {name}: {time.monotonic() - started:.0f} s\n", flush=True)
        if completed.returncode:
            failed.append(name)
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as handle:
            rows += list(csv.reader(handle))[1:]
    write_rows(arguments.out / "targets.csv", rows)
    if rows:
        draw(rows, arguments.out / "targets.png")
    missed = sum(row[5] != "yes" for row in rows)
    print(f"{len(rows)} figures in {arguments.out / 'targets.csv'}, {missed} missed.")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
