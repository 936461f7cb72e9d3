"""The flags of `ddm sample`: what means nothing is refused before anything is opened, what remains is obeyed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from ddm.cli.conditions import condition_shares, describe_shares
from ddm.cli.main import app
from ddm.cli.options import read_memory
from ddm.cli.strategy_options import expert_weights
from ddm.ensemble import ClassPrior, Ensemble
from ddm.errors import MathError, MemoryLimitError, SetupError
from ddm.protocol.architecture import ClassCondition, TextCondition
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.publishing import least_memory, verify_release


def sample(*words: object) -> BaseException | None:
    """Run the command; return how it ended, None for well."""
    result = CliRunner().invoke(app, ["sample", *map(str, words)])
    return result.exception


def test_flag_that_means_nothing_is_refused_before_a_release_is_looked_for(tmp_path: Path) -> None:
    for flags, named in [
        ("--strategy full --tau 0.5", "--tau"),
        ("--strategy sample --prefix full", "--prefix"),
        ("--strategy lock --prefix full", "--prefix"),
        ("--strategy top-1 --top-k 2", "--top-k"),
        ("--set mass=0.5", "--set mass"),
        ("--strategy top-k --set least=0.5", "--set least"),
        ("--set router-every=3", "--set router-every"),
        ("--guidance 2", "--guidance"),
        ("--set class-prior=equal", "--set class-prior"),
        ("--text left", "--text"),
        ("--text left --text-encoder nowhere --class 1", "--text"),
        ("--text-encoder nowhere", "--text-encoder"),
        ("--memory lots", "--memory"),
        ("--init a.png", "--init"),
        ("--t-start 0.5", "--t-start"),
        ("--init a.png --t-start 0", "--t-start"),
        ("--inpaint a.png", "--inpaint"),
        ("--mask a.png", "--mask"),
        ("--init a.png --t-start 0.5 --inpaint a.png --mask a.png", "--init"),
        ("--inpaint a.png --mask a.png --set router-every=3", "--set router-every"),
        ("--set corrections=3", "--set corrections"),
        ("--set guidance-interval=0.2,0.8", "--set guidance-interval"),
        ("--class 1 --guidance 1 --set guidance-interval=0.8,0.2", "--set guidance-interval"),
        ("--class 1 --guidance 1 --set guidance-interval=low", "--set guidance-interval"),
    ]:
        with case(flags=flags, named=named):
            words = (
                "nowhere",
                "--root",
                "nowhere",
                "--num",
                4,
                "--out",
                tmp_path / "new" / "a.npz",
            )
            ended = sample(*words, *flags.split())
            assert isinstance(ended, SetupError)
            assert ended.subject == named
            assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("700", 700)])
def test_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert read_memory(text) == size
    for wrong in ("-1GiB", "1GB", "1e3", "GiB", ""):
        with pytest.raises(SetupError):
            read_memory(wrong)


def test_prior_is_dealt_among_silos_that_have_data() -> None:
    """A silo's weight goes to its experts by their data; one whose experts have none cannot be given any."""
    silo_ids = ["east", "north", "east", "south"]
    own = [0.1, 0.0, 0.3, 0.6]
    assert expert_weights("--prior", "equal", silo_ids, own) == pytest.approx(
        [0.125, 0.0, 0.375, 0.5]
    )
    assert expert_weights("--prior", "east=3,south=1", silo_ids, own) == pytest.approx(
        [0.1875, 0.0, 0.5625, 0.25]
    )
    assert expert_weights("--prior", "data", silo_ids, own) == own
    for wrong in ("north=1", "west=1", "east=-1", "east=nan", "east=1,east=2", "east=0", "east"):
        with pytest.raises(SetupError, check=has_subject("--prior")):
            expert_weights("--prior", wrong, silo_ids, own)


def test_flags_reach_the_sampler(published: PublishedRelease, tmp_path: Path) -> None:
    """Strategies, solvers and budgets give images; a budget gives the very same."""
    words = (
        published.release,
        "--root",
        published.root,
        "--state",
        tmp_path / "state",
        "--num",
        4,
        "--steps",
        2,
    )

    def draw(flags: str) -> np.ndarray:
        out = tmp_path / "a.npz"
        assert sample(*words, "--out", out, *flags.split()) is None
        with np.load(out) as file:
            return np.asarray(file["images"])

    plain = draw("")
    least = least_memory(verify_release(published, published.release), num=4, batch=64, steps=2)
    assert np.array_equal(draw(f"--memory {least}"), plain)
    refused = sample(*words, "--out", tmp_path / "b.npz", "--memory", least - 1)
    assert isinstance(refused, MemoryLimitError) and "--num" in refused.remedy
    np.testing.assert_allclose(draw("--set batch=1"), plain, atol=1e-5)
    for flags in (
        "--solver rk4",
        "--solver dpm",
        "--strategy top-k --top-k 1",
        "--strategy lock --tau 0.5 --prefix full",
    ):
        assert not np.array_equal(draw(flags), plain)


def test_parts_with_first_are_the_images_of_one_command_and_share_a_folder(
    published: PublishedRelease, tmp_path: Path
) -> None:
    """With one sample in each evaluation, to the byte; a control without --first draws the first ones again."""
    release = (published.release, "--root", published.root, "--state", tmp_path / "state")
    words = (*release, "--steps", 2, "--strategy", "sample", "--set", "batch=1", "--num")

    def draw(out: str, num: int, *flags: object) -> None:
        assert sample(*words, num, "--out", tmp_path / out, *flags) is None

    draw("whole.npz", 8)
    for number in (0, 4):
        draw(f"{number}.npz", 4, "--first", number)
        draw("parts", 4, "--first", number)
    draw("again.npz", 4)
    with (
        np.load(tmp_path / "whole.npz") as whole,
        np.load(tmp_path / "0.npz") as left,
        np.load(tmp_path / "4.npz") as right,
        np.load(tmp_path / "again.npz") as again,
    ):
        for name in ("images", "expert"):
            assert np.array_equal(np.concatenate([left[name], right[name]]), whole[name])
        assert np.array_equal(again["images"], left["images"])
        assert not np.array_equal(again["images"], right["images"])
    draw("whole", 8)
    parts = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    assert parts == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert sorted(parts) == [f"{number:05d}.png" for number in range(8)]


def test_images_of_ones_own_are_varied_and_completed(
    published: PublishedRelease, tmp_path: Path
) -> None:
    words = (
        published.release,
        "--root",
        published.root,
        "--state",
        tmp_path / "state",
        "--steps",
        3,
        "--num",
        2,
    )
    plan = verify_release(published, published.release).plan
    images = np.zeros((1, *plan.data.shape), np.float32)
    mask = np.ones(plan.data.shape[1:], np.uint8)
    mask[:, : mask.shape[1] // 2] = 0
    np.savez(tmp_path / "images.npz", images=images)
    np.savez(tmp_path / "mask.npz", mask=mask)
    Image.fromarray(mask * 255).save(tmp_path / "mask.png")

    def draw(*flags: object) -> np.ndarray:
        assert sample(*words, "--out", tmp_path / "out.npz", *flags) is None
        with np.load(tmp_path / "out.npz") as file:
            assert (
                str(file["release"]) == verify_release(published, published.release).manifest_digest
            )
            return np.asarray(file["images"])

    near = draw("--init", tmp_path / "images.npz", "--t-start", 0.05, "--strategy", "sample")
    far = draw("--init", tmp_path / "images.npz", "--t-start", 1)
    assert np.abs(near).mean() < 0.2 < np.abs(far).mean()
    # At 1 nothing of an image is left.
    np.savez(tmp_path / "other.npz", images=images + 0.9)
    of_another = draw("--init", tmp_path / "other.npz", "--t-start", 1)
    np.testing.assert_allclose(far, of_another, atol=1e-5)
    inpaint = ("--inpaint", tmp_path / "images.npz", "--mask")
    completed = draw(*inpaint, tmp_path / "mask.png")
    assert not completed[:, :, mask == 0].any() and completed[:, :, mask == 1].all()
    assert np.array_equal(
        completed, draw(*inpaint, tmp_path / "mask.npz", "--set", "corrections=9")
    )
    assert not np.array_equal(
        completed, draw(*inpaint, tmp_path / "mask.png", "--strategy", "full")
    )
    np.savez(tmp_path / "three.npz", images=np.repeat(images, 3, 0))
    for flags, message in (
        (("--init", tmp_path / "three.npz", "--t-start", 0.5), "3 images"),
        (("--init", tmp_path / "gone.npz", "--t-start", 0.5), "gone.npz"),
        ((*inpaint, tmp_path / "images.npz"), "mask"),
    ):
        assert message in str(sample(*words, "--out", tmp_path / "out.npz", *flags))


def test_class_is_refused_when_experts_know_none(
    published: PublishedRelease, tmp_path: Path
) -> None:
    words = (published.release, "--root", published.root, "--state", tmp_path / "state", "--num", 4)
    assert "condition" in str(sample(*words, "--out", tmp_path / "a.npz", "--class", 1))


def two_experts(condition: ClassCondition | TextCondition) -> Ensemble:
    """Experts of which the second holds most of all data, and the first most of class 1."""
    experts = [lambda x_B, t_B, *c_B: x_B] * 2
    return Ensemble(
        experts=experts,  # type: ignore[arg-type]
        router=None,
        prior=[0.25, 0.75],
        shape=(1, 4, 4),
        expert_ids=["east", "north"],
        condition=condition,
        class_prior=lambda label: ClassPrior([0.8, 0.2] if label else [0.1, 0.9]),
    )


def test_shares_stand_beside_the_prior_given_the_class_that_was_asked_for() -> None:
    ensemble = two_experts(ClassCondition(num_classes=2))
    own = [0.25, 0.75]
    equal = [0.5, 0.5]
    held = condition_shares(ensemble, 1, None)
    label = "prior given class 1"
    assert (
        describe_shares(ensemble, (0.7, 0.3), own, held, 1)
        == f"east 0.70 ({label} 0.80), north 0.30 ({label} 0.20)"
    )
    # Equal silos in place of 1 to 3: 0.8 / 0.25 to 0.2 / 0.75, as 12 to 1.
    assert "east 0.70 (prior given class 1 0.92)" in describe_shares(
        ensemble, (0.7, 0.3), equal, held, 1
    )
    assert condition_shares(ensemble, 1, equal) == equal
    assert (
        describe_shares(ensemble, (0.7, 0.3), own, None, None)
        == "east 0.70 (prior 0.25), north 0.30 (prior 0.75)"
    )
    with pytest.raises(MathError, check=has_subject("condition")):
        condition_shares(ensemble, 2, None)


def test_of_many_experts_only_those_with_most_samples_are_listed() -> None:
    num_experts = 64
    ensemble = Ensemble(
        experts=[lambda x_B, t_B, c_B: x_B] * num_experts,  # type: ignore[list-item]
        router=None,
        prior=[1.0] * num_experts,
        shape=(1, 4, 4),
        expert_ids=[f"silo{number}" for number in range(num_experts)],
    )
    # Twelve of the last ones have one half of the samples, and all others together the other half.
    shares = (0.5 / 52,) * 52 + (0.5 / 12,) * 12
    text = describe_shares(ensemble, shares, [1 / num_experts] * num_experts, None, None)
    assert text.startswith("silo52 0.04 (prior 0.02), silo53 0.04")
    assert text.endswith("silo63 0.04 (prior 0.02), and 52 others 0.50 in all")


def test_nobody_knows_who_holds_a_text_so_the_prior_is_that_of_all_images() -> None:
    ensemble = two_experts(TextCondition(dim=3, max_tokens=2))
    held = condition_shares(ensemble, torch.ones(2, 3), None)
    assert held == [0.25, 0.75]
    assert (
        describe_shares(ensemble, (0.5, 0.5), [0.25, 0.75], held, None)
        == "east 0.50 (prior 0.25), north 0.50 (prior 0.75)"
    )
    assert "east 0.50 (prior 0.50)" in describe_shares(ensemble, (0.5, 0.5), [0.5, 0.5], held, None)
