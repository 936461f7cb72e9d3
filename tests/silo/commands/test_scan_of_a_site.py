"""`silo scan SITE` with limits of its own: one scan, and advice that lasts."""

from pathlib import Path

import numpy as np
from PIL import Image

from silo.config import Site
from silo.images.report import report
from silo.images.scanned_image import ScannedImage
from silo.images.summary import Summary
from tests.support.commands import run_command
from tests.support.dicom_files import waves
from tests.support.federation import POLICY, PlannedFederation, write_policy

SILO = "north"


def of_pictures(planned: PlannedFederation, folder: Path) -> Site:
    """A site of which policy.toml declares pictures, two of them."""
    site = planned[0].copy(folder / "copy").sites[SILO]
    data = folder / "data"
    data.mkdir()
    for number in range(2):
        Image.fromarray(waves(high=200 + number, dtype=np.uint8)).save(data / f"{number}.png")
    write_policy(site, POLICY | {"data": {"kind": "pictures", "min_images": 2}})
    toml = site.path / "silo.toml"
    toml.write_text(toml.read_text().replace(site.settings().data, str(data)))
    return site


def test_limits_given_to_a_scan_of_a_site_hold_for_all_of_it(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    site = of_pictures(planned_once, tmp_path)
    words = ("silo", "scan", site.path, "--seconds", 30, "--memory", 2048)
    first = run_command(*words)
    assert (
        "2 files were decoded now" in first.out
        and "The data match the table [data] of policy.toml" in first.out
    )
    assert "0 files were decoded now" in run_command(*words).out


def test_scan_of_too_few_images_names_both_remedies(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    site = of_pictures(planned_once, tmp_path)
    write_policy(site, POLICY | {"data": {"kind": "pictures", "min_images": 3}})
    result = run_command("silo", "scan", site.path)
    assert result.code == 7
    assert "to do:    Add images, or lower this number in policy.toml" in result.err


def test_advice_about_limits_is_a_line_of_silo_toml_where_the_images_are_those_of_a_site(
    tmp_path: Path,
) -> None:
    summary = Summary()
    for reason in ("too much memory", "too much time"):
        summary.add(ScannedImage("a", None, reason=reason))
    said = report(summary, tmp_path, of_site=True, review_command="silo review")
    assert (
        "raise images.memory_mib in silo.toml" in said
        and "raise images.seconds in silo.toml" in said
    )
    said = report(summary, tmp_path, of_site=False, review_command="silo review")
    assert "raise the limit with --memory" in said and "raise the limit with --seconds" in said
