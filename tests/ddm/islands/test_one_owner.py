"""One data set in islands, from split to verified samples, through the commands that a researcher types."""

import base64
import json
import re
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from ddm.encoders.text import TextEncoder
from ddm.errors import FederationError
from ddm.islands.arrays import map_array
from ddm.islands.folder import Islands
from ddm.loading.plan import PlanFiles
from ddm.loading.release import open_release
from ddm.protocol.architecture import TextCondition
from ddm.protocol.base import sha256_file
from tests.support.commands import run_command
from tests.support.islands import RECIPE, Owner, digits
from tests.support.pages import PageReader, active_content
from tests.support.stranger import Stranger
from tests.support.text_encoders import make_encoder, save_encoder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    """Two islands by clusters, trained and assembled once."""
    owner = Owner.make(tmp_path_factory.mktemp("owner"))
    for result in (owner.split("--islands", 2), owner.train(), owner.assemble("release")):
        assert result.code == 0, result.err
    return owner


def copied(owner: Owner, to: Path) -> Owner:
    """A copy whose changes reach nobody."""
    shutil.copytree(owner.path, to / "owner")
    return Owner(to / "owner")


def manifest(owner: Owner, release: str) -> dict[str, object]:
    result = owner.read("info", release, "--json")
    assert result.code == 0, result.err
    document: dict[str, object] = json.loads(result.out)
    return document


def test_release_of_islands_under_a_strangers_root_is_refused(
    trained: Owner, tmp_path: Path
) -> None:
    stranger = Stranger(trained.path / "release", tmp_path / "stranger")
    stranger.sign_again()
    refused = run_command("ddm", "verify", stranger.copy, "--root", stranger.root)
    assert refused.code == FederationError.exit_code, refused
    assert "island0.json" in refused.err


def test_release_of_islands_verifies_and_samples_with_the_researchers_commands(
    trained: Owner, tmp_path: Path
) -> None:
    verified = trained.read("verify", "release")
    assert verified.code == 0, verified.err
    info = trained.read("info", "release")
    assert "island0" in info.out and "one owner had all of the data" in info.out
    card = next(trained.path.glob("release/targets/*/README.md")).read_text().replace("\\", "")
    front_matter = yaml.safe_load(card.split("---\n")[1])
    assert [island["id"] for island in front_matter["islands"]] == ["island0", "island1"]
    # What the card tells a reader to type is the name of the file that the owner hands on.
    assert f"--root {trained.root.name}" in card and trained.root.is_file()
    for low, high in ((0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1)):
        error = next(
            line for line in card.splitlines() if line.startswith(f"| t {low:g} to {high:g} |")
        ).split("|")[2]
        assert error.strip() in info.out
    for strategy in ("lock", "full"):
        out = tmp_path / f"{strategy}.npz"
        sampled = trained.read(
            "sample", "release", "--num", 6, "--steps", 3, "--strategy", strategy, "--out", out
        )
        assert sampled.code == 0, sampled.err
        images = np.load(out)["images"]
        assert images.shape == (6, 1, 8, 8)
        assert np.isfinite(images).all()


def test_report_says_what_the_release_does_and_its_first_images_are_those_that_its_command_draws(
    trained: Owner, tmp_path: Path
) -> None:
    release = open_release(trained.path / "release", root=trained.root, state=None)
    listed = {file.path: file for file in release.manifest.files}
    page = (release.folder / "report.html").read_text("utf-8")
    assert listed["report.html"].digest == sha256_file(release.folder / "report.html")
    assert active_content(page) == []
    read = PageReader(page)
    islands = Islands(trained.run)
    expected = [
        "digits",
        release.manifest.plan_id,
        release.manifest.plan_digest,
        release.manifest.router.file.digest,
    ]
    for number, island in enumerate(islands.split.islands):
        record = islands.trained(number)
        expected += [
            island.island_id,
            str(island.num_images),
            f"{record.training.loss:.4f}",
            record.expert.digest,
        ]
    assert [what for what in expected if what not in read.text] == []
    assert "silo" not in read.text
    shown = [value for tag, name, value in read.attributes if (tag, name) == ("img", "src")]
    (flags,) = re.findall(r"--root 1.root.json (.*) --out samples.png", read.text)
    drawn = trained.read(
        "sample", "release", *flags.split(), "--device", "cpu", "--out", tmp_path / "drawn"
    )
    assert drawn.code == 0, drawn.err
    for source, picture in zip(shown, sorted((tmp_path / "drawn").iterdir())[:32], strict=False):
        pixels = np.asarray(
            Image.open(BytesIO(base64.b64decode(source.split(",")[1]))).convert("L"), dtype=int
        )
        # of rounding
        assert np.abs(pixels - np.asarray(Image.open(picture).convert("L"), dtype=int)).max() <= 1


def test_release_states_shares_of_the_images_and_no_privacy(trained: Owner) -> None:
    release = open_release(trained.path / "release", root=trained.root, state=None)
    split = Islands(trained.run).split
    assert [expert.prior for expert in release.manifest.experts] == pytest.approx(
        [island.num_images / 600 for island in split.islands], abs=1e-12
    )
    assert not release.plan.statistics.private
    assert [(silo.epsilon, silo.delta, silo.audit) for silo in release.manifest.silos] == [
        (None, None, "none")
    ] * 2
    assert [expert.cluster for expert in release.manifest.experts] == [0, 1]


def test_islands_hold_every_image_once_in_the_cluster_of_its_nearest_centroid(
    trained: Owner,
) -> None:
    """Against distances by numpy, in float64."""
    islands = Islands(trained.run)
    (images, _) = digits()
    files = PlanFiles.load(islands.plan, islands.bundle)
    feature_ND = files.encoder.encode(torch.from_numpy(images)).double().numpy()
    centre_FD = files.clusters.centroids_FD.double().numpy()
    nearest_N = ((feature_ND[:, None] - centre_FD[None]) ** 2).sum(2).argmin(1)
    island_N = files.clusters.coarse_F.numpy()[nearest_N]
    for number in range(2):
        rows = map_array(islands.island(number).rows).numpy()
        assert rows.tolist() == np.flatnonzero(island_N == number).tolist()
        assert np.array_equal(map_array(islands.island(number).images).numpy(), images[rows])


def test_random_islands_are_equal_disjoint_and_whole(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path)
    assert owner.split("--islands", 7, "--by", "random").code == 0
    islands = Islands(owner.run)
    rows = [map_array(islands.island(number).rows).tolist() for number in range(7)]
    assert sorted(row for part in rows for row in part) == list(range(600))
    assert {len(part) for part in rows} == {85, 86}
    # not in the file's order
    assert not any(part == sorted(range(part[0], part[0] + len(part))) for part in rows)
    assert (islands.split.by, islands.split.column) == ("random", None)


def test_islands_by_a_column_hold_one_value_each(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path)
    assert owner.split("--by", "site").code == 0
    islands = Islands(owner.run)
    (_, label_N) = digits()
    assert [island.value for island in islands.split.islands] == ["high", "low"]
    for number, small in ((0, False), (1, True)):
        assert set(label_N[map_array(islands.island(number).rows).numpy()] < 4) == {small}
    wrong = Owner.make(tmp_path / "other").split("--by", "site", "--islands", 3)
    assert wrong.code == 3
    assert "3 values" in wrong.err


def test_missing_island_is_named_a_partial_release_renormalised_and_the_next_version_whole(
    trained: Owner, tmp_path: Path
) -> None:
    owner = copied(trained, tmp_path)
    (owner.run / "islands" / "1" / "trained.json").unlink()
    (owner.run / "islands" / "1" / "expert.safetensors").unlink()
    refused = owner.assemble("second")
    assert refused.code == 3
    assert "none for 1" in refused.err and "--island 1" in refused.err
    assert not (owner.path / "second").exists()
    result = owner.assemble("second", "--partial")
    assert result.code == 0, result.err
    assert "PARTIAL: without island1" in result.out
    second = manifest(owner, "second")
    assert (second["version"], second["missing_silos"]) == (2, ["island1"])
    assert [expert["prior"] for expert in second["experts"]] == [1.0]  # type: ignore[attr-defined]
    assert (
        owner.read(
            "sample", "second", "--num", 2, "--steps", 2, "--out", tmp_path / "some.npz"
        ).code
        == 0
    )
    trained_now = owner.train()
    assert "All 2 islands are trained" in trained_now.out
    assert owner.assemble("third").code == 0
    third = manifest(owner, "third")
    assert (third["version"], third["missing_silos"], len(third["experts"])) == (3, [], 2)  # type: ignore[arg-type]
    later = owner.read("verify", "third", "--state", tmp_path / "seen")
    assert later.code == 0, later.err
    rolled_back = owner.read("verify", "second", "--state", tmp_path / "seen")
    assert rolled_back.code == 13


def test_training_again_gives_the_same_expert_to_the_byte(trained: Owner, tmp_path: Path) -> None:
    owner = copied(trained, tmp_path)
    expert = owner.run / "islands" / "0" / "expert.safetensors"
    before = expert.read_bytes()
    expert.unlink()
    (expert.parent / "trained.json").unlink()
    assert owner.train("--island", 0).code == 0
    assert expert.read_bytes() == before
    other = (owner.run / "islands" / "1" / "expert.safetensors").read_bytes()
    assert other != before


def test_expert_that_changed_after_training_is_not_assembled(
    trained: Owner, tmp_path: Path
) -> None:
    owner = copied(trained, tmp_path)
    expert = owner.run / "islands" / "0" / "expert.safetensors"
    data = bytearray(expert.read_bytes())
    data[-1] ^= 1
    expert.write_bytes(data)
    refused = owner.assemble("second")
    assert refused.code == 12
    assert "islands/0" in refused.err


@pytest.mark.parametrize("kind", ["counts", pytest.param("samples", marks=pytest.mark.slow)])
def test_other_router_families_are_assembled_too(trained: Owner, tmp_path: Path, kind: str) -> None:
    size = {
        "counts": "",
        "samples": "hidden = 16\ndepth = 1\npatch = 4\nheads = 2\nnum_steps = 20\nconditional = true\n",
    }[kind]
    before = 'kind = "learned"\nhidden = 16\ndepth = 1\nnum_steps = 40\n'
    recipe = RECIPE.replace(before, f'kind = "{kind}"\n{size}')
    classes = '[condition]\nkind = "class"\nnum_classes = 10\n'
    owner = Owner.make(tmp_path, steps=5, recipe=recipe, extra=classes)
    for result in (owner.split(), owner.train(), owner.assemble("release")):
        assert result.code == 0, result.err
    for strategy in ("lock", "full"):
        how = ("--strategy", strategy, "--class", 3, "--out", tmp_path / f"{strategy}.npz")
        sampled = owner.read("sample", "release", "--num", 2, "--steps", 2, *how)
        assert sampled.code == 0, sampled.err
    if kind == "samples":
        conditions = map_array(Islands(owner.run).router / "fitted-conditions.npy")
        assert len(conditions) == len(map_array(Islands(owner.run).router / "fitted.npy"))


@pytest.mark.slow
def test_captions_are_encoded_once_and_condition_the_experts(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "tiny-t5", make_encoder("T5EncoderModel"))
    wanted = f'[condition]\nkind = "text"\nencoder = "{folder}"\nmax_tokens = 4\n'
    before = 'kind = "learned"\nhidden = 16\ndepth = 1\nnum_steps = 40\n'
    reading = 'kind = "samples"\nhidden = 16\ndepth = 1\npatch = 4\nheads = 2\nnum_steps = 20\nconditional = true\n'
    assert before in RECIPE
    owner = Owner.make(
        tmp_path / "owner", steps=5, recipe=RECIPE.replace(before, reading), extra=wanted
    )
    for result in (owner.split(), owner.train(), owner.assemble("release")):
        assert result.code == 0, result.err
    islands = Islands(owner.run)
    (_, label_N) = digits()
    rows = map_array(islands.island(1).rows).numpy()[:3]
    condition = islands.plan.condition
    assert isinstance(condition, TextCondition)
    texts = TextEncoder.open(folder, condition).encode(
        [f"the digit {label_N[row]}" for row in rows]
    )
    assert torch.allclose(map_array(islands.island(1).labels)[:3], texts, atol=1e-6)
    words = ("--text", "the digit 3", "--text-encoder", folder, "--num", 2, "--steps", 2)
    sampled = owner.read("sample", "release", *words, "--out", tmp_path / "some.npz")
    assert sampled.code == 0, sampled.err
    (manifest,) = (tmp_path / "owner").rglob("release/targets/*/manifest.json")
    # else it was worse than counts
    reads = json.loads(manifest.read_text("utf-8"))["router"]["kind"] == "samples"
    assert ("No release states" in sampled.out) != reads
