"""The page: what was measured, by which command, with which seeds and on what; and what is missing."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ddm.system.console import human_flops, human_seconds
from examples.paper.tables.data import World
from examples.paper.tables.figures import draw_table
from examples.paper.tables.presets import Preset
from examples.paper.tables.published import Cells, Record, write_cells
from examples.paper.tables.results import Cell, over_seeds
from examples.paper.tables.rows import Table
from examples.paper.tables.targets import TableTarget, targets, write_targets

_TITLES = {
    "fid": "FID",
    "fid_pca": "FID, PCA",
    "kid": "KID",
    "precision": "precision",
    "recall": "recall",
    "agreement": "agreement",
    "cross_entropy": "cross-entropy",
    "completion_error": "completion error",
    "share_error": "share error",
    "share_error_images": "share error, images",
    "router_share_error": "router's share error",
    "evaluations": "evaluations",
    "images_per_s": "images/s",
    "flops": "training FLOPs",
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "wall_s": "wall time",
    "smallest_followed": "follow the smallest",
    "smallest_drawn": "drawn in its region",
    "smallest_recall": "recall of its test images",
    "alone_fid": "FID, alone",
    "own_fid": "FID, own images",
    "joint_own_fid": "together, own",
    "smallest_own_fid": "the smallest silo's",
    "rounds": "rounds",
    "bytes": "bytes",
    "start_flops": "FLOPs of the base",
}
_LIMITED = (
    "`--row` limited some of these runs to single rows. Without it, the commands measure all rows."
)
_TRAINING = ("training steps x batch", "training FLOPs", "training time")
_PLACES = {
    "fid": 1,
    "fid_pca": 1,
    "kid": 3,
    "evaluations": 1,
    "images_per_s": 0,
    "alone_fid": 1,
    "own_fid": 1,
    "joint_own_fid": 1,
    "smallest_own_fid": 1,
    "rounds": 0,
}


@dataclass(frozen=True)
class Report:
    """All that the page says.

    Attributes:
        world: the data set.
        preset: the sizes.
        tables: in order.
        found: cells by table, label and seed; what was not measured is not in it.
        record: where each of these tables comes from, and how learning rates were chosen.
        missing: what is not in it, in words.
    """

    world: World
    preset: Preset
    tables: Sequence[Table]
    found: Mapping[int, Cells]
    record: Record
    missing: Sequence[str]

    def write(self, out: Path) -> None:
        """Write README.md, run.json, a CSV and a PNG for each table, and targets.csv; nothing without a figure."""
        if not self._cells():
            return
        shown = [table for table in self.tables if self.found.get(table.number)]
        for table in shown:
            cells = self.found[table.number]
            write_cells(out / f"table{table.number}.csv", cells)
            draw_table(table, cells, out / f"table{table.number}.png", self._origin(cells))
        reached = targets(self.found)
        write_targets(out / "targets.csv", reached)
        self.record.write(out)
        parts = [
            self._head(),
            self._tuning(),
            *(self._section(table) for table in shown),
            self._targets(reached),
        ]
        (out / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", "utf-8")

    def _cells(self) -> list[Cell]:
        return [
            cell
            for cells in self.found.values()
            for by_seed in cells.values()
            for cell in by_seed.values()
        ]

    def _origin(self, *tables: Cells) -> str:
        """Name data set and preset, and how many seeds the rows of these tables have, or of all."""
        nums = {
            len(by_seed) for cells in tables or self.found.values() for by_seed in cells.values()
        }
        least = min(nums)
        most = max(nums)
        seeds = (
            f"{most} seed{'s' if most != 1 else ''}"
            if least == most
            else f"{least} to {most} seeds"
        )
        return f"{self.world.name}, preset {self.preset.name}, {seeds}"

    def _head(self) -> str:
        world = self.world
        network = self.preset.network
        preset = self.preset
        cells = self._cells()
        seeds = sorted({cell.seed for cell in cells})
        hardware = sorted(
            {cell.hardware.split(" on ")[0].rpartition(", ")[0] or cell.hardware for cell in cells}
        )
        days = sorted({cell.utc[:10] for cell in cells})
        points = [
            f"**Measured** {' to '.join(dict.fromkeys((days[0], days[-1])))}, {_seeds(seeds)}, on "
            f"{'; '.join(hardware)}. Commit, hardware, threads and load of each row are in its CSV. Times are medians "
            "over seeds, also over those of different hardware. If other work ran on the machine, times and images/s "
            "may differ between rows of equal evaluations.",
            f"**Images**: {len(world.train)} training, {len(world.public)} public, {len(world.validation)} validation "
            f"and {len(world.test)} test images. Learning rates are chosen on the validation images. The temperature "
            "of a router is chosen on training images on which its groups were not fitted.",
            f"**Models**: monolith and experts are the same transformer (patch {network.patch}, width "
            f"{network.hidden}, depth {network.depth}), trained by the same recipe for the same FLOPs. Each of K "
            f"experts takes the monolith's number of steps, with {preset.batch_size}/K images in each. The monolith "
            "takes additional steps for the FLOPs of training a router. 1500 x 8 means 1,500 training steps of 8 "
            f"images by each expert. Routers of ensembles: {self._routers()}.",
            f"**Samples**: {preset.num_samples}, by {preset.sampling_steps} steps of midpoint, against the test "
            "images. FID, KID, precision and recall use the 64 features of a small classifier that was trained on the "
            f"public images: {self._judges()}. *FID, PCA* uses the {preset.pca_dim} principal components of the public "
            "images.",
            f"**Intervals** are 95%. {_intervals(cells)}",
        ]
        lines = [
            f"# The paper's tables: {self._origin()}",
            self._commands(),
            "\n".join(map(_point, points)),
        ]
        if self.missing:
            lines.append(_filled("Incomplete: " + "; ".join(self.missing) + "."))
        return "\n\n".join(lines)

    def _commands(self) -> str:
        """List the commands, with the tables that each measured."""
        of: dict[str, list[int]] = {}
        for number in sorted(self.found):
            for command in self.record.tables[number].commands:
                of.setdefault(command, []).append(number)
        lines = [f"{command}    # {_numbers(numbers)}" for command, numbers in of.items()]
        limited = (
            ""
            if not any("rows" in reason for reason in self.missing)
            else f"\n\n{_filled(_LIMITED)}"
        )
        return "\n".join(["```", *lines, "```"]) + limited

    def _judges(self) -> str:
        """Name the classifiers, with the tables that each judged; figures of one alone can be compared."""
        of: dict[str, list[int]] = {}
        accuracy: dict[str, float] = {}
        for number in sorted(self.found):
            judge = self.record.tables[number].judge
            of.setdefault(judge.digest, []).append(number)
            accuracy[judge.digest] = judge.accuracy
        sentences = [
            f"sha256 `{digest[:16]}`, correct on {accuracy[digest]:.1%} of the test images"
            + (f", in {_numbers(numbers)}" if len(of) > 1 else "")
            for digest, numbers in of.items()
        ]
        alone = "these tables" if len(of) == 1 else "the tables of one classifier"
        return f"{'; '.join(sentences)}; compare figures only within {alone}"

    def _routers(self) -> str:
        """Name the families of the ensembles' own routers, with their temperatures."""
        temperatures: dict[str, list[str]] = {}
        for name in sorted(
            {cell.router for cell in self._cells()} - {"", "prior", "exact posterior"}
        ):
            family, _, temperature = name.partition(", T = ")
            temperatures.setdefault(family, []).append(temperature)
        routers = (
            f"{family} (temperature {' to '.join(dict.fromkeys((t[0], t[-1])))})"
            for family, t in temperatures.items()
        )
        return ", ".join(routers) or "none was used"

    def _tuning(self) -> str:
        if not any(choice.tried for choice in self.record.rates.values()):
            return ""
        rows = []
        for kind, choice in self.record.rates.items():
            tried = choice.in_words or "not tuned"
            rows.append(
                (kind, f"{choice.rate:.3g}", tried, str(choice.steps or ""), choice.judge[:8])
            )
        table = _markdown(
            ("model", "rate", "FID on validation images by rate", "steps", "classifier"), rows
        )
        text = (
            "Each rate was chosen on the validation images, with a separate seed, in runs with the number of steps in "
            f"the column *steps* ({self.preset.tuning:g} of all). It is used at every budget. If the best rate is at "
            "the edge of the grid, further rates are tried. Experts of random parts and of silos use the rate of the "
            "same number of feature clusters. Mixed objectives and models with classes use the rate of plain models, "
            "and a longer student uses that of the shorter one. These rates may not be the best for them."
        )
        if len({choice.judge for choice in self.record.rates.values() if choice.judge}) > 1:
            text += " A rate that was chosen with one classifier is also used in the tables of the other."
        return f"## Learning rates\n\n{_filled(text)}\n\n{table}"

    def _section(self, table: Table) -> str:
        cells = self.found[table.number]
        rows = []
        for label, by_seed in cells.items():
            costs = [cell.cost for cell in by_seed.values() if cell.cost]
            values = [_shown(by_seed, name) for name in table.columns]
            took = dict.fromkeys(_TRAINING, "")
            if costs:
                steps = f"{costs[0].steps} x {costs[0].batch_size}"
                flops = human_flops(costs[0].flops)
                seconds = human_seconds(median(cost.seconds for cost in costs))
                took = dict(zip(_TRAINING, (steps, flops, seconds), strict=True))
            if "flops" in table.columns:  # the same figure
                del took[_TRAINING[1]]
            rows.append((label, *values, *took.values(), str(len(by_seed))))
        training = [
            title for title in _TRAINING if "flops" not in table.columns or title != _TRAINING[1]
        ]
        titles = ("", *(_TITLES[name] for name in table.columns), *training, "seeds")
        text = f"{table.note} {_by_chance(cells) if 'share_error' in table.columns else ''}".strip()
        number = table.number
        note = f"{_filled(text)}\n\n" if text else ""
        return (
            f"## Table {number}: {table.title}\n\n{note}{_markdown(titles, rows)}\n\n"
            f"![{table.title}](table{number}.png)\n\nEvery seed: [table{number}.csv](table{number}.csv)."
        )

    def _targets(self, reached: Sequence[TableTarget]) -> str:
        rows = []
        has_all_tables = len(self.found) == len(self.tables)
        for target in reached:
            # A page of some tables leaves out the targets of the others; targets.csv has all.
            if target.value is None and not has_all_tables:
                continue
            value = "" if target.value is None else f"{target.value:.3g}"
            if target.low is not None and target.high is not None:
                value += f" ({target.low:.3g} to {target.high:.3g})"
            met = {"": "not measured", "no": "**no**"}.get(target.met, target.met)
            rows.append((target.figure, target.target, value, str(target.seeds), met, target.note))
        if not rows:
            return ""
        note = (
            "A strategy is neutral if its mean share error is under .02, or within the range of chance in 97.5 of 100 "
            "runs with this number of samples and seeds. A target is met if the whole interval of at least three seeds "
            "reaches it, missed if no part does, and otherwise undecided. The best strategy and the best monolith are "
            "those with the lowest FIDs shown; this favours the side with more rows."
        )
        table = _markdown(("figure", "to reach", "measured", "seeds", "met", "of"), rows)
        return f"## Targets\n\n{_filled(note)}\n\n{table}"


def _shown(by_seed: Mapping[int, Cell], name: str) -> str:
    figure_interval = over_seeds(by_seed, name)
    if figure_interval is None:
        return ""
    mean, low, high = figure_interval
    if name in ("flops", "start_flops"):
        return human_flops(mean)
    if name == "wall_s":
        return human_seconds(
            median(cell.figures[name].value for cell in by_seed.values() if name in cell.figures)
        )
    if name.startswith("bytes"):
        return f"{mean / 1e6:.2f} MB"
    places = _PLACES.get(name, 3)
    interval = "" if low is None or high is None else f" ({low:.{places}f} to {high:.{places}f})"
    return f"{mean:.{places}f}{interval}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _intervals(cells: Sequence[Cell]) -> str:
    """Say what intervals are of, where some rows have more seeds than others as well."""
    of_one = "Intervals of one seed are over samples and test images only, so they do not cover other seeds."
    if len({cell.seed for cell in cells}) == 1:
        return of_one
    return (
        "Intervals of several seeds are over seeds, by Student's t; those of FID and of ratios are computed on "
        f"logarithms, with geometric means. {of_one} Seeds change clusters, weights, batches and noise. Images, "
        "classifier and learning rates are the same for all seeds, and intervals do not cover them. A ratio is over "
        "the seeds that both rows have; if rows have different numbers of seeds, it may differ from the ratio of means."
    )


def _by_chance(cells: Cells) -> str:
    """Say how large a share error is where experts are drawn exactly by their priors."""
    figures_of_cells = [cell.figures for by_seed in cells.values() for cell in by_seed.values()]
    mean, limit = (
        sorted(figures[name].value for figures in figures_of_cells if name in figures)
        for name in ("share_mean_by_chance", "share_by_chance")
    )
    if not mean:
        return ""
    means = " to ".join(dict.fromkeys((f"{mean[0]:.3f}", f"{mean[-1]:.3f}")))
    return (
        f"By chance, draws that follow the priors exactly have a mean share error of {means}, and at most "
        f"{limit[-1]:.3f} in 97.5 of 100 runs."
    )


def _numbers(tables: Sequence[int]) -> str:
    *first, last = map(str, tables)
    return f"tables {', '.join(first)} and {last}" if first else f"table {last}"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---", *("---:" for _ in titles[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _point(text: str) -> str:
    return _filled(f"- {text}").replace("\n", "\n  ")


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
