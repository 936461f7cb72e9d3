"""A silo whose images are files in a table, with patients and classes by name, from its commands to a release."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aggregator.membership.registry import enroll_silo
from ddm import open_ensemble
from ddm.ensemble import SamplingOptions
from ddm.errors import DataError, SetupError
from ddm.protocol.base import sha256_file
from silo.config import ImagesSettings, Site
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, POLICY, TinyFederation, recipe, write_policy

TRANSFORM = {"channels": "grey", "range": {"kind": "full"}, "storage": "uint8"}
CLASSES = {"kind": "class", "num_classes": 2, "names": ["dim", "bright"]}
NUM = 60


def export(folder: Path, *, nobody: int = 0) -> Path:
    """Pictures in files, two of each patient, and a table of them with a German column."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = ["path;patient;befund"]
    for number in range(NUM):
        bright = number % 3 == 0
        noise = rng.integers(128 if bright else 0, 256 if bright else 128, (24, 20), np.uint8)
        Image.fromarray(noise).save(folder / f"MRN{number:04d}.png")
        patient = "" if number < nobody else f"DOE^{number // 2}"
        rows.append(f"{folder.name}/MRN{number:04d}.png;{patient};{'Bright ' if bright else 'dim'}")
    (folder / "MRN9999.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows.append(f"{folder.name}/MRN9999.png;DOE^1;dim")
    table = folder.with_suffix(".csv")
    table.write_text("\n".join(rows) + "\n")
    return table


def join(tiny: TinyFederation, silo_id: str, table: Path, policy: dict[str, object]) -> Site:
    """Make the site of a silo by its commands, and let the aggregator take it in."""
    site = Site(tiny.path / silo_id)
    card = tiny.path / f"{silo_id}.card.json"
    (tiny.path / "pass").write_bytes(PASSPHRASE + b"\n")
    passphrase = ("--passphrase-file", tiny.path / "pass")
    invitation = tiny.federation.path / "invitation.json"
    invited = ("--invitation", invitation, "--code", sha256_file(invitation))
    data = ("--data", table, "--column", "label=befund")
    result = run_command("silo", "init", site.path, "--id", silo_id, *data, *invited, *passphrase)
    assert result.code == 0, result.err
    assert f"{NUM} images accepted, 1 in quarantine" in result.out and "Bright" in result.out
    assert "MRN" not in result.out and "DOE" not in result.out
    assert site.settings().images == ImagesSettings(columns={"label": "befund"})
    write_policy(site, policy)
    result = run_command("silo", "enroll", site.path, "--out", card, *passphrase)
    assert result.code == 0, result.err
    enroll_silo(tiny.federation, card)
    tiny.sites[silo_id] = site
    return site


DECLARED = {"kind": "pictures", "classes": ["dim", "bright"]}


def test_a_table_of_files_becomes_a_cohort_with_patients_and_named_classes(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    table = export(tmp_path / "export")
    site = join(tiny, "south", table, POLICY | {"privacy": {"unit": "patient"}, "data": DECLARED})
    assert site.agreed() is not None and (site.agreed().images, site.agreed().patients) == (64, 32)
    statistics = recipe().statistics.model_dump(mode="json") | {"unit": "patient"}
    plan_id = tiny.sign(recipe(transform=TRANSFORM, condition=CLASSES, statistics=statistics))
    tiny.deliver_plan("south", plan_id)
    whole = table.read_text()
    for spoilt, said in (
        (
            whole.replace("DOE^3;", ";"),
            "patients: expected a patient for each image, got none for 2 of 60 images",
        ),
        (
            whole.replace("Bright", "DOE", 1),
            "classes of the plan, dim, bright, got others at 1 of 60 images",
        ),
    ):
        table.write_text(spoilt)
        with case(said=said), pytest.raises(DataError) as caught:
            tiny.work("south")
        assert said in str(caught.value) and "DOE" not in str(caught.value)
    assert site.ledger_path.read_bytes() == b"" and tiny.state_of("south").state == "plan_accepted"
    table.write_text(whole)
    assert tiny.work("south").state == "in_outbox"
    left_out = (site.private / "images" / "left-out.csv").read_text()
    assert "MRN9999.png" in left_out and len(left_out.splitlines()) == 2
    hidden = (b"MRN0", b"DOE^", b"befund", b"Bright")
    sent = [path for path in (tiny.path / "south" / "outbox").rglob("*") if path.is_file()]
    assert sent and not [path for path in sent for name in hidden if name in path.read_bytes()]


@pytest.mark.slow
def test_names_of_classes_travel_from_a_table_to_samples(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": NUM})  # which numbers its classes
    declared = {"data": {"kind": "pictures", "classes": ["dim", "bright"]}}
    join(tiny, "south", export(tmp_path / "export"), POLICY | declared)
    transform = TRANSFORM | {"range": {"kind": "percentiles"}}
    tiny.complete(tmp_path / "release", recipe(transform=transform, condition=CLASSES))
    pinned = ("--root", tiny.root, "--state", tmp_path / "state")
    assert (
        "one of 2 classes, dim, bright"
        in run_command("ddm", "info", tmp_path / "release", *pinned).out
    )
    sample = (
        "ddm",
        "sample",
        tmp_path / "release",
        *pinned,
        "--num",
        2,
        "--steps",
        2,
        "--strategy",
        "full",
    )
    shares = ("--set", "class-prior=equal")
    assert (
        run_command(*sample, *shares, "--class", " BRIGHT", "--out", tmp_path / "a.npz").code == 0
    )
    assert run_command(*sample, *shares, "--class", 1, "--out", tmp_path / "b.npz").code == 0
    with np.load(tmp_path / "a.npz") as drawn, np.load(tmp_path / "b.npz") as same:
        assert drawn["class"].tolist() == ["bright"] * 2 and np.array_equal(
            drawn["images"], same["images"]
        )
    assert run_command(*sample, *shares, "--class", "dim", "--out", tmp_path / "grid.png").code == 0
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.text["Class"] == "dim"  # type: ignore[attr-defined]
    result = run_command(*sample, "--class", "red", "--out", tmp_path / "c.npz")
    assert result.code == SetupError.exit_code and "a class, dim, bright" in result.err
    ensemble = open_ensemble(tmp_path / "release", root=tiny.root)
    samples = ensemble.sample(
        2,
        steps=2,
        condition="bright",
        strategy="full",
        options=SamplingOptions(condition_prior=[1, 1]),
    )
    assert samples.classes == ("bright", "bright")
