"""Tables that an earlier run published: taken over, shown beside others, refused where they are of something else."""

import json
import shutil
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from ddm.errors import DataError, MissingFileError
from examples.paper import run
from examples.paper.tables.judging import CLASSIFIER
from examples.paper.tables.lab import settings_digest
from examples.paper.tables.presets import preset_for
from examples.paper.tables.published import RECORD, Published, Record, read_cells, write_cells
from examples.paper.tables.results import Cell, Cost, Figure
from tests.paper.test_tables import tiny, words


@pytest.fixture(autouse=True)
def _small(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(run, "preset_for", tiny)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What would be committed of a run: page, figures, record and classifier, without models and cells."""
    out, kept = (tmp_path_factory.mktemp("first") / name for name in ("out", "published"))
    with MonkeyPatch.context() as patch:
        patch.setattr(run, "preset_for", tiny)
        assert run.main(words(out)) == 0
    shutil.copytree(out, kept, ignore=shutil.ignore_patterns("cells", "models", "locks"))
    return kept


def judged_by(folder: Path, digest: str) -> None:
    record = json.loads((folder / RECORD).read_bytes())
    record["tables"]["2"]["judge"]["digest"] = digest
    (folder / RECORD).write_text(json.dumps(record))


def test_published_rows_of_the_same_classifier_are_not_measured_again(
    published: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(words(out, "--published", str(published))) == 0
    assert not (out / "models").exists() and "training" not in capsys.readouterr().out
    assert (out / "table2.csv").read_text("utf-8") == (published / "table2.csv").read_text("utf-8")
    page = (out / "README.md").read_text("utf-8")
    assert "--published PUBLISHED" in page and str(published) not in page
    assert page.count("python -m examples.paper.run") == 2, (
        "the run that measured, and the one that went on"
    )
    # need not be named again
    assert run.main(words(out, "--tables", "10", "--row", "lock(1), euler, 4")) == 0
    assert (out / "table2.csv").read_text("utf-8") == (published / "table2.csv").read_text("utf-8")


def test_published_table_of_another_classifier_is_shown_as_it_was_and_measured_anew_where_asked_for(
    published: Path, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    out = tmp_path / "out"
    shutil.copytree(published, before)
    (before / CLASSIFIER).unlink()
    judged_by(before, "ab" * 32)
    more = ("--tables", "10", "--row", "lock(1), euler, 4", "--published", str(before))
    assert run.main(words(out, *more)) == 0
    page = (out / "README.md").read_text("utf-8")
    assert f"sha256 `{'ab' * 8}`" in page and "in table 2" in page and "in table 10" in page
    assert page.count(
        "python -m examples.paper.run"
    ) == 2 and "the tables of one classifier" in " ".join(page.split())
    assert read_cells(out / "table2.csv") == read_cells(before / "table2.csv")
    assert run.main(words(out, "--published", str(before), "--row", "monolith")) == 0
    assert set(read_cells(out / "table2.csv")) == {"1 (monolith)"}


def test_tables_of_other_settings_or_none_are_refused(
    published: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    assert run.main(words(tmp_path / "out", "--scale", "0.5", "--published", str(published))) != 0
    said = capsys.readouterr().err
    assert "same data set, preset and scale" in said and "Traceback" not in said
    with pytest.raises(MissingFileError):
        Published.read(tmp_path, "")
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(DataError):
        Published.read(tmp_path, "")


def test_figures_come_back_from_their_csv(tmp_path: Path) -> None:
    cost = Cost(
        steps=3,
        batch_size=2,
        learning_rate=0.5,
        flops=2e9,
        router_flops=1e8,
        seconds=1.5,
        commit="c",
    )
    values = {"fid": Figure(value=1.25, low=1.0, high=1.5), "evaluations": Figure(value=20.0)}
    cell = Cell(
        seed=4,
        cost=cost,
        router="counts, T = 1.00",
        num_samples=7,
        sampling_seconds=2.5,
        figures=values,
        commit="d",
        hardware="one, two",
        utc="now",
    )
    cells = {"a, b": {4: cell}, "floor": {4: cell.model_copy(update={"cost": None, "router": ""})}}
    path = tmp_path / "table.csv"
    write_cells(path, cells)
    assert read_cells(path) == cells
    text = path.read_text("utf-8")
    for damaged in (
        text.replace("1.25", "much"),
        text.replace("row,seed", "row,sead"),
        text.replace('a, b",4', 'a, b",x'),
    ):
        path.write_text(damaged, "utf-8")
        with pytest.raises(DataError):
            read_cells(path)


@pytest.mark.parametrize(
    ("folder", "world", "num_images", "scale"),
    [
        ("tables-fashion-mnist", "fashion-mnist", 37_500, 1.0),
        ("tables-cxr", "cxr, base hannover (818188e7)", 3_270, 0.5),
    ],
)
def test_published_tables_are_of_the_sizes_that_the_preset_has_now(
    folder: str, world: str, num_images: int, scale: float
) -> None:
    """Else nobody could continue them by the commands on their page."""
    preset = preset_for("cpu", (1, 28, 28)).scaled(scale)
    settings = settings_digest(world, num_images, preset)
    results = Path(__file__).parents[2] / "docs/results"
    assert Record.read(results / folder, settings).tables
