"""Trains, samples and evaluates the models of the paper's tables, and writes CSV, figures and a page.

    python -m examples.paper.run --dataset fashion-mnist --data FOLDER --preset cpu --out DIR

Results stay in --out. So the same command continues where it was stopped, and more tables or seeds reuse the models
there. Several processes with the same --out share the work; start each with --threads 1.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import sleep
from typing import get_args

import torch

from ddm.errors import ArchipelagoError, BusyError, DataError, MissingFileError, SetupError
from ddm.system.console import fail, say
from examples.paper.tables.clock import EXIT_OUT_OF_TIME, Clock, ended
from examples.paper.tables.contents import tables
from examples.paper.tables.data import DatasetName, read_world
from examples.paper.tables.judging import Judge
from examples.paper.tables.lab import Lab, settings_of
from examples.paper.tables.page import Report
from examples.paper.tables.presets import PresetName, preset_for
from examples.paper.tables.published import Cells, Origin, Published, Record, cells_of
from examples.paper.tables.rates import candidates, kind_of
from examples.paper.tables.results import Cell, RateChoice, command_of, commit
from examples.paper.tables.rows import Row, Table
from examples.paper.tables.sharing import alone

_PLANNED = range(1, 12)
_PAUSE_S = 2.0
_DEFAULT_TABLES = {"smoke": tuple(_PLANNED), "cpu": (1, 2, 3, 4, 7), "gpu": tuple(_PLANNED)}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parse(words)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    commit()  # now: the code that runs, not what is there when a row ends
    command = command_of("examples.paper.run", words, left_out="--row")
    return ended(lambda: run(arguments, Clock(arguments.minutes), command), arguments.out)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m examples.paper.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the command is shown on the page, where files of this machine have names of their own
    )
    parser.add_argument("--dataset", choices=get_args(DatasetName), required=True)
    parser.add_argument("--data", type=Path, help="files of the data set; digits need none")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="NPZ",
        help="images of another origin, which the public base of table 11 learns; by default, public images of three "
        "classes of Fashion-MNIST",
    )
    parser.add_argument(
        "--preset",
        choices=get_args(PresetName),
        required=True,
        help="size of models, training and samples",
    )
    parser.add_argument(
        "--tables",
        type=_numbers,
        help="tables to measure, such as 1,3,7; default: 1,2,3,4,7 with the preset cpu, otherwise all",
    )
    parser.add_argument(
        "--row",
        action="append",
        metavar="TEXT",
        help="row to measure, by its name or a part of it; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for models, cells, tables, figures and page"
    )
    parser.add_argument(
        "--published",
        type=Path,
        metavar="FOLDER",
        help="folder of an earlier run's tables to continue, with its classifier if the folder has one",
    )
    parser.add_argument("--seeds", type=int, help="number of seeds; default: that of the preset")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="share of all training steps and samples; default 1",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"minutes after which the run stops, with status {EXIT_OUT_OF_TIME}",
    )
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    arguments = parser.parse_args(words)
    arguments.tables = arguments.tables or _DEFAULT_TABLES[arguments.preset]
    if not 0 < arguments.scale <= 1:
        parser.error("--scale: above 0, at most 1")
    if any(number is not None and number < 1 for number in (arguments.seeds, arguments.threads)):
        parser.error("--seeds and --threads: at least 1")
    if arguments.minutes is not None and arguments.minutes <= 0:
        parser.error("--minutes: above 0")
    return arguments


def _numbers(text: str) -> tuple[int, ...]:
    known = _DEFAULT_TABLES["gpu"]
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not set(numbers) <= set(known):
        raise argparse.ArgumentTypeError(f"some of {','.join(map(str, known))}, not {text!r}")
    return numbers


def run(given: argparse.Namespace, clock: Clock, command: str) -> int:
    """Measure the rows that were asked for with every seed, and write the page; return the exit status.

    Raises:
        SetupError: no row is named like that, or the data set is not there.
    """
    if given.out.exists() and not given.out.is_dir():
        raise SetupError("--out", expected="a folder, or none yet", got=f"the file {given.out}")
    world = read_world(given.dataset, given.data)
    if given.base is not None:
        world = world.with_base(given.base)
    preset = preset_for(given.preset, world.data.shape).scaled(given.scale)
    known = tables(preset, world.num_classes)
    rows = rows_named([row for number in given.tables for row in known[number].rows], given.row)
    given.out.mkdir(parents=True, exist_ok=True)
    published = Published.of(given.out, given.published, settings_of(world, preset))
    judge = Judge.open(world, preset, given.out, clock)
    lab = Lab(world, preset, given.out, judge, clock, published)
    num_seeds = given.seeds or preset.seeds
    try:
        status = _measure(lab, rows, num_seeds)
    finally:  # also where it was stopped: the page says what is missing
        with alone(given.out, "page", wait=True):
            _report(lab, known, given.tables, command, num_seeds).write(given.out)
    say(f"Tables {', '.join(map(str, given.tables))}: {given.out / 'README.md'}")
    return status


def rows_named(rows: Sequence[Row], texts: Sequence[str] | None) -> list[Row]:
    """Return the rows that have one of these names, or whose name has the text where none is it; all without texts."""
    labels = {row.label for row in rows}
    exact = set(texts or ()) & labels
    parts = set(texts or ()) - labels
    chosen_rows = [
        row
        for row in rows
        if texts is None or row.label in exact or any(part in row.label for part in parts)
    ]
    if not chosen_rows:
        raise SetupError(
            "--row",
            expected=f"text from one of: {'; '.join(row.label for row in rows)}",
            got=", ".join(map(repr, texts or ())),
        )
    return chosen_rows


def _measure(lab: Lab, rows: Sequence[Row], num_seeds: int) -> int:
    """Choose all rates and measure all rows with every seed; what another process is at comes later.

    A row that fails is reported, and the others go on; return the exit status of the last that failed, or 0.
    """
    status = 0
    trained = {
        kind_of(source, lab.preset): source
        for row in rows
        for source in candidates(row, lab.preset)
    }
    left: list[Callable[[], object]] = [partial(lab.rate, source) for source in trained.values()]
    left += [partial(lab.cell, row, seed) for seed in range(num_seeds) for row in rows]
    while left:
        busy = []
        for job in left:
            try:
                job()
            except BusyError:
                busy.append(job)
            except ArchipelagoError as error:
                status = fail(error)
        if len(busy) == len(left):
            lab.clock.check()
            sleep(_PAUSE_S)
        left = busy
    return status


def _report(
    lab: Lab, known: Mapping[int, Table], wanted: Sequence[int], command: str, num_seeds: int
) -> Report:
    """Gather what is there: of the tables that were asked for, and of others that were measured whole or published.

    A table that was not asked for, and that another classifier judged, is shown as it was published.
    """
    cells: dict[int, Cells] = {}
    origins: dict[int, Origin] = {}
    settings = settings_of(lab.world, lab.preset)
    try:
        before = Record.read(lab.out, settings).tables
    except (MissingFileError, DataError):  # the first run here, or one of other sizes
        before = {}
    rates: dict[str, RateChoice] = {}
    for number, table in known.items():
        origin = before.get(number) or lab.published.origin(number)
        is_wanted = number in wanted
        judged_otherwise = origin is not None and not origin.judged_by(lab.judge.about)
        elsewhere = lab.published.cells.get(number, {})
        rows = elsewhere if judged_otherwise and not is_wanted else _rows(lab, table, num_seeds)
        if not rows or not (is_wanted or origin or len(rows) == len(table.rows)):
            continue
        cells[number] = rows
        if origin and not is_wanted:
            origins[number] = origin
        else:
            earlier = origin.commands if origin and not judged_otherwise else ()
            commands = tuple(dict.fromkeys((*earlier, command)))
            origins[number] = Origin(commands=commands, judge=lab.judge.about)
        for source in (
            source
            for row in table.rows
            if row.label in rows
            for source in candidates(row, lab.preset)
        ):
            if choice := lab.chosen(source):
                rates[kind_of(source, lab.preset)] = choice
    missing = [f"table {number}" for number in _PLANNED if number not in cells]
    for table in (known[number] for number in cells):
        nums = [len(cells[table.number].get(row.label, {})) for row in table.rows]
        # More seeds of some rows than the preset has are no reason to miss others.
        least = min(lab.preset.seeds, max([*nums, num_seeds if table.number in wanted else 1]))
        if few := sum(num < least for num in nums):
            fewer = f"fewer than {least} seeds" if least > 1 else "no seed"
            none = f", {nums.count(0)} of them with none" if least > 1 and 0 in nums else ""
            missing.append(f"{few} of {len(nums)} rows of table {table.number} with {fewer}{none}")
    record = Record(settings=settings, tables=origins, rates=rates)
    return Report(lab.world, lab.preset, list(known.values()), cells, record, missing)


def _rows(lab: Lab, table: Table, num_seeds: int) -> Cells:
    """Return the cells of a table that this run's classifier judged, by label and seed.

    The seeds are this run's, those of earlier ones in the folder, and published ones.
    """
    rows: dict[str, dict[int, Cell]] = {}
    earlier = (cells_of(lab.out, table.number), lab.published.cells.get(table.number, {}))
    for row in table.rows:
        seeds = sorted(
            {*range(num_seeds), *(seed for cells in earlier for seed in cells.get(row.label, {}))}
        )
        cells = {seed: cell for seed in seeds if (cell := lab.found(row, seed)) is not None}
        if cells:
            rows[row.label] = cells
    return rows


if __name__ == "__main__":
    sys.exit(main())
