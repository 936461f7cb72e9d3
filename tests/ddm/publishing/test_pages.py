"""The report and the card of a release: what they say is what the documents say, and nothing in them is alive."""

import base64
import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from PIL import Image
from scipy.stats import binomtest
from selenium.webdriver import Chrome
from torch import Tensor
from typer.testing import CliRunner

from aggregator.intake.inventory import take_inventory
from aggregator.router.train import load_report
from ddm.cli.main import app as ddm
from ddm.ensemble import Ensemble
from ddm.errors import DocumentError
from ddm.loading.ensemble import load_ensemble
from ddm.loading.release import open_release
from ddm.pages.pictures import MAX_PIXELS
from ddm.pages.render import MAX_NAMED_CLASSES
from ddm.protocol.architecture import ClassCondition
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import REHEARSAL
from ddm.protocol.submission import Submission
from ddm.protocol.transform import TransformSpec
from ddm.publishing import drawing, figures
from ddm.publishing.contents import ReleaseContents, ReleaseMember
from ddm.publishing.pages import CARD_NAME, PAGE_NAMES, REPORT_NAME, render_pages, write_pages
from tests.conftest import USUAL_EFFORTS, PublishedRelease
from tests.support.browser import overflow, show_as
from tests.support.case import case
from tests.support.pages import PageReader, active_content

HOSTILE = "</p><script>alert(1)</script> [x](javascript:alert(1)) `\n\n# **y** | ![z](http://a.example/b) <img src=x>"

NAME = "</p><img src=x> [x](//a.example) | **b** ![z](http://a/b)"  # of a class, which is one line of at most 64


@dataclass(frozen=True)
class PageInput:
    """What the pages of a release are made from, read back from what was published.

    Attributes:
        contents: what the release states.
        manifest: as published.
        root_digest: the fingerprint of the root of trust.
        targets: holds experts and router.
        ensemble: experts and router, loaded.
    """

    contents: ReleaseContents
    manifest: Manifest
    root_digest: str
    targets: Path
    ensemble: Ensemble

    @property
    def submissions(self) -> dict[str, Submission]:
        """Each silo's document."""
        documents = {member.silo_id: member.document for member in self.contents.members}
        return {
            silo_id: document
            for silo_id, document in documents.items()
            if isinstance(document, Submission)
        }

    def with_contents(self, **changes: Any) -> "PageInput":
        """The same, with some of the contents changed."""
        return replace(self, contents=replace(self.contents, **changes))

    def with_plan(self, **changes: object) -> "PageInput":
        """The same, with some fields of the plan changed."""
        return self.with_contents(plan=self.contents.plan.model_copy(update=changes))


def page_input(published: PublishedRelease) -> PageInput:
    federation = published.tiny.federation
    inventory = take_inventory(federation)
    release = open_release(published.release, root=published.root, state=None)
    members = [
        ReleaseMember(silo, inventory.silos[silo.silo_id].submission, b"")
        for silo in release.manifest.silos
    ]
    settings = federation.settings()
    contents = ReleaseContents(
        name=settings.name,
        cite=settings.cite,
        plan=inventory.plan,
        plan_digest=inventory.plan_digest,
        members=tuple(members),
        missing_silos=(),
        withdrawn_silos=(),
        router=load_report(federation, inventory),
    )
    return PageInput(
        contents=contents,
        manifest=release.manifest,
        root_digest=release.verified.root_fingerprint,
        targets=release.folder,
        ensemble=load_ensemble(release),
    )


@pytest.fixture(scope="module")
def inputs(published_once: PublishedRelease) -> PageInput:
    return page_input(published_once)


@pytest.fixture(scope="module")
def drawn(published_once: PublishedRelease) -> Mapping[str, str]:
    """Both pages as they were published."""
    targets = published_once.release / "targets" / published_once.plan_id
    return {name: (targets / name).read_text("utf-8") for name in PAGE_NAMES}


def undrawn(inputs: PageInput) -> Mapping[str, str]:
    """Both pages, of experts too large to draw from."""
    return render_pages(inputs.contents, inputs.manifest, inputs.root_digest, None)


def front_matter(card: str) -> dict[str, object]:
    parsed = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(parsed, dict)
    return parsed


def test_card_and_report_say_of_every_silo_what_the_manifest_says(
    inputs: PageInput, drawn: Mapping[str, str]
) -> None:
    cards = PageReader(drawn[REPORT_NAME]).cards
    listed = front_matter(drawn[CARD_NAME])["silos"]
    assert isinstance(listed, list) and len(listed) == len(cards) == len(inputs.manifest.silos) == 2
    for silo, entry in zip(inputs.manifest.silos, listed, strict=True):
        submission = inputs.submissions[silo.silo_id]
        card = cards[silo.silo_id]
        prior = sum(
            expert.prior for expert in inputs.manifest.experts if expert.silo_id == silo.silo_id
        )
        assert entry == {
            "id": silo.silo_id,
            "key_fingerprint": silo.key_fingerprint,
            "images": submission.num_units,
            "counted": silo.units,
            "share": prior,
            "epsilon": silo.epsilon,
            "delta": silo.delta,
            "isolation": silo.isolation,
            "audit": silo.audit,
            "admitted": False,
        }
        assert card["key"] == silo.key_fingerprint
        assert float(card["epsilon"].split()[0]) == silo.epsilon
        assert float(card["delta"]) == silo.delta
        assert int(card["images"]) == submission.num_units
        assert float(card["share"]) == pytest.approx(prior, abs=5e-4)
        assert card["isolation"].split()[0] == silo.isolation
        assert card["leak audit"] == "waived by test operator: made-up images"


def test_report_gives_steps_releases_comparisons_and_provenance(
    inputs: PageInput, drawn: Mapping[str, str]
) -> None:
    text = PageReader(drawn[REPORT_NAME]).text
    expected = [
        inputs.contents.plan.plan_id,
        inputs.contents.plan_digest,
        inputs.root_digest,
        inputs.manifest.router.file.digest,
    ]
    expected += [silo.submission.digest for silo in inputs.manifest.silos]
    for submission in inputs.submissions.values():
        expected += [str(expert.steps) for expert in submission.experts]
        expected += [
            f"epsilon {statistic.epsilon:g}, delta {statistic.delta:g}"
            for statistic in submission.statistics
        ]
    assert inputs.contents.router.bands and inputs.contents.router.calibration
    expected += [f"{band.difference:+.5f}" for band in inputs.contents.router.bands]
    expected += [f"{band.after[0]:.3f}" for band in inputs.contents.router.calibration]
    assert all(band.bins for band in inputs.contents.router.calibration)
    expected += [
        f"at a probability of {bin.confidence:.2f}"
        for band in inputs.contents.router.calibration
        for bin in band.bins
    ]
    assert [what for what in expected if what not in text] == []


def test_silos_that_are_not_in_are_named_with_the_reason(inputs: PageInput) -> None:
    changed = {"missing_silos": ("south",), "withdrawn_silos": ("west",)}
    partial = undrawn(replace(inputs, manifest=inputs.manifest.model_copy(update=changed)))
    for page in (partial[CARD_NAME], PageReader(partial[REPORT_NAME]).text):
        assert re.search(r"south is missing", page) and re.search(r"west is withdrawn", page)
    whole = undrawn(inputs)
    assert (
        "Partial capacity" in partial[REPORT_NAME] and "Partial capacity" not in whole[REPORT_NAME]
    )
    assert front_matter(partial[CARD_NAME])["withdrawn_silos"] == ["west"]


def test_expert_that_an_operator_admitted_though_screening_flagged_it_is_named_with_the_reason(
    inputs: PageInput,
) -> None:
    """In the manifest, the report and the card; the control is the release that nothing was flagged of."""
    document = json.loads(inputs.manifest.encode())
    document["silos"][1]["admitted"] = True
    document["experts"][1]["flags"] = ["copy", "stands_apart"]
    admitted = Manifest.parse(json.dumps(document).encode(), subject="manifest")
    expert = admitted.experts[1].expert_id
    silo_id = admitted.silos[1].silo_id
    pages = undrawn(replace(inputs, manifest=admitted))
    whole = undrawn(inputs)
    words = "copies another silo's expert; a much higher loss than the other experts"
    assert f"{expert}: {words}" in PageReader(pages[REPORT_NAME]).cards[silo_id]["screening"]
    assert f"flagged the submission of {silo_id}" in PageReader(pages[REPORT_NAME]).text
    assert f"expert {expert} ({words})" in pages[CARD_NAME]
    assert [entry["admitted"] for entry in front_matter(pages[CARD_NAME])["silos"]] == [False, True]  # type: ignore[attr-defined]
    assert not [page for page in whole.values() if "lagged" in page]


def test_card_says_what_became_of_each_picture_where_the_plan_says_it(inputs: PageInput) -> None:
    transform = TransformSpec(channels="grey", padding=0.0)
    card = undrawn(inputs.with_plan(transform=transform))[CARD_NAME]
    assert f"- Each picture, at every silo: {'; '.join(transform.words)}" in card.splitlines()
    assert "Each picture" not in undrawn(inputs)[CARD_NAME]


def with_classes(inputs: PageInput, num: int, names: tuple[str, ...] = ()) -> PageInput:
    condition = ClassCondition(num_classes=num, names=names)
    return inputs.with_plan(condition=condition)


def test_pages_name_the_classes_that_samples_can_be_asked_for(inputs: PageInput) -> None:
    names = tuple(f"finding {number}" for number in range(MAX_NAMED_CLASSES + 3))
    for num, known, words in (
        (2, ("normal", "pneumonia"), ", or by name: normal, pneumonia"),
        (3, (), ": 0 to 2"),
        (len(names), names, f", {names[MAX_NAMED_CLASSES - 1]} and 3 more"),
    ):
        pages = undrawn(with_classes(inputs, num, known))
        report = PageReader(pages[REPORT_NAME]).text
        card = pages[CARD_NAME]
        for begin, end, page in (("", ".", report), ("- ", "\n", card)):
            line = page.split(f"{begin}{num} classes, asked for with", 1)[1].split(end)[0]
            assert line.endswith(words), line
    assert not [page for page in undrawn(inputs).values() if "--class" in page]


def test_silo_that_counts_as_less_than_it_stated_is_named_with_both_numbers_and_the_reason(
    inputs: PageInput,
) -> None:
    """The reason is the operator's free text: markup in it stays text."""
    reason = "<script>alert(1)</script> | **129** by their own count"
    document = json.loads(inputs.manifest.encode())
    document["silos"][1] |= {"units": 30, "units_reason": reason}
    lowered = Manifest.parse(json.dumps(document).encode(), subject="manifest")
    pages = undrawn(replace(inputs, manifest=lowered))
    silo_id = lowered.silos[1].silo_id
    stated = inputs.submissions[silo_id].num_units
    assert (
        f"{stated} stated, counted as 30: {reason}"
        in PageReader(pages[REPORT_NAME]).cards[silo_id]["images"]
    )
    assert active_content(pages[REPORT_NAME]) == []
    assert f"{silo_id} counts as 30 of the {stated} images that it states" in pages[CARD_NAME]
    assert "<script>" not in pages[CARD_NAME]
    assert "stated, counted as" not in PageReader(undrawn(inputs)[REPORT_NAME]).text


def test_manifest_with_a_flag_but_no_admission_is_refused(inputs: PageInput) -> None:
    document = json.loads(inputs.manifest.encode())
    Manifest.parse(json.dumps(document).encode(), subject="manifest")
    for flags in (["copy"], ["made up"]):
        document["experts"][1]["flags"] = flags
        with pytest.raises(DocumentError):
            Manifest.parse(json.dumps(document).encode(), subject="manifest")


def test_pages_load_nothing_run_nothing_and_lead_nowhere(drawn: Mapping[str, str]) -> None:
    assert active_content(drawn[REPORT_NAME]) == []
    assert active_content(HOSTILE) != []
    assert active_content('<a href="https://a.example">x</a>') != []


def hostile(inputs: PageInput) -> PageInput:
    """The same release, had everybody who may write free text meant harm."""
    members = []
    for member in inputs.contents.members:
        assert isinstance(member.document, Submission)
        waiver = member.document.audit.waiver
        assert waiver
        said_by = waiver.model_copy(update={"role": HOSTILE, "reason": HOSTILE})
        audit = member.document.audit.model_copy(update={"waiver": said_by})
        said = {"audit": audit, "software": {HOSTILE: HOSTILE}}
        members.append(replace(member, document=member.document.model_copy(update=said)))
    router = inputs.contents.router.model_copy(update={"reason": HOSTILE})
    changed = with_classes(inputs, 2, ("normal", NAME)).with_contents(
        members=tuple(members), router=router
    )
    manifest = inputs.manifest.model_copy(update={"cite": HOSTILE, "licence": HOSTILE})
    return replace(changed, manifest=manifest)


def test_card_and_report_call_a_rehearsal_one(inputs: PageInput) -> None:
    rehearsal = undrawn(inputs.with_plan(rehearsal=True))
    trained = undrawn(inputs.with_plan(rehearsal=False))
    for name in (CARD_NAME, REPORT_NAME):
        assert REHEARSAL in rehearsal[name]
        assert "rehearsal" not in trained[name].lower()


def test_markup_in_free_text_is_text_in_the_report(inputs: PageInput) -> None:
    page = undrawn(hostile(inputs))[REPORT_NAME]
    assert active_content(page) == []
    assert PageReader(page).text.count(HOSTILE) == 4 + 4 * len(inputs.contents.members)
    honest = undrawn(with_classes(inputs, 2, ("normal", "pneumonia")))
    assert (
        NAME in PageReader(page).text
        and PageReader(page).tags == PageReader(honest[REPORT_NAME]).tags
    )


def test_markup_in_free_text_is_text_in_the_card(inputs: PageInput) -> None:
    card = undrawn(hostile(inputs))[CARD_NAME]
    honest = undrawn(with_classes(inputs, 2, ("normal", "pneumonia")))[CARD_NAME]
    # A reader that lets everything through: HTML, tables, and links made of bare addresses.
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")

    def kinds(text: str) -> list[str]:
        return [
            token.type for block in parser.parse(text) for token in (block, *(block.children or ()))
        ]

    body = card.split("---\n", 2)[2]
    plain = [kind for kind in kinds(body) if kind != "text"]
    assert plain == [kind for kind in kinds(honest.split("---\n", 2)[2]) if kind != "text"]
    assert not {"html_inline", "html_block", "link_open", "image"} & set(plain)
    assert {"html_block", "link_open", "image"} & set(kinds(HOSTILE))
    shown = "".join(token.content for block in parser.parse(body) for token in block.children or ())
    assert " ".join(HOSTILE.split()) in " ".join(shown.split()) and NAME in shown
    matter = front_matter(card)
    assert (matter["license"], matter["license_name"]) == ("other", HOSTILE)
    assert matter["root_fingerprint"] == inputs.root_digest


def test_commands_of_the_card_verify_the_release(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = page_input(published)
    card = undrawn(inputs)[CARD_NAME]
    shutil.copytree(published.release, tmp_path / "release")
    shutil.copyfile(published.root, tmp_path / "1.root.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (command,) = re.findall(r"\$ ddm (verify (?:\\\n|.)*)\n", card)
    result = CliRunner().invoke(ddm, shlex.split(command.replace("\\\n", " ")))
    assert result.exit_code == 0, result.output
    assert result.output.count("by the key you pinned") == len(inputs.manifest.silos)
    wrong = command.replace(inputs.manifest.silos[0].key_fingerprint, "0" * 64)
    assert CliRunner().invoke(ddm, shlex.split(wrong.replace("\\\n", " "))).exit_code != 0


def test_same_release_gives_the_same_pages(
    inputs: PageInput, drawn: Mapping[str, str], tmp_path: Path
) -> None:
    reports: list[tuple[int, int]] = []
    shutil.copytree(inputs.targets, tmp_path / inputs.targets.name)
    write_pages(
        inputs.contents,
        inputs.manifest,
        tmp_path / inputs.targets.name,
        root_digest=inputs.root_digest,
        on_progress=lambda num_done, total: reports.append((num_done, total)),
    )
    assert {
        name: (tmp_path / inputs.targets.name / name).read_text("utf-8") for name in PAGE_NAMES
    } == drawn
    assert [num_done for num_done, _ in reports] == list(range(1, reports[0][1] + 1))


def test_images_of_the_report_are_those_that_its_command_draws(
    inputs: PageInput, drawn: Mapping[str, str]
) -> None:
    sources = [
        value
        for tag, name, value in PageReader(drawn[REPORT_NAME]).attributes
        if (tag, name) == ("img", "src")
    ]
    (num, steps, seed), *_ = re.findall(
        r"--num (\d+) --steps (\d+) --seed (\d+)", drawn[REPORT_NAME]
    )
    samples = inputs.ensemble.sample(int(num), strategy="lock", steps=int(steps), seed=int(seed))
    shown = [
        np.asarray(Image.open(BytesIO(base64.b64decode(source.split(",")[1]))))
        for source in sources[: int(num)]
    ]
    expected = ((samples.images.clamp(-1, 1) + 1) * 127.5).round().byte()[:, 0].numpy()
    assert np.array_equal(np.stack(shown)[..., 0], expected)
    assert expected.std() > 0
    assert len(sources) == 2 * 32 + 2 * 8


def test_command_of_the_report_draws_as_many_images_as_are_shown(inputs: PageInput) -> None:
    effort = drawing.DrawingEffort(own=4, mixed=8, strategies=("lock",), steps=2)
    few_images = drawing.draw(inputs.ensemble, (0, 1), effort)
    pages = render_pages(inputs.contents, inputs.manifest, inputs.root_digest, few_images)
    assert "--num 8 --steps 2 " in pages[REPORT_NAME]


class Constant:
    """An expert that leads every sample to one grey level."""

    def __init__(self, level: float) -> None:
        self.level = level

    def __call__(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return (x_B - self.level) / t_B.clamp(min=1e-3).view(-1, 1, 1, 1)


class Levels:
    """The router that goes with three of them: it knows the grey level the better, the less noise there is."""

    num_experts = 3

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        level_E = torch.tensor([-0.5, 0.0, 0.5])
        t_B1 = t_B[:, None]
        precision_B1 = 20 * (1 - t_B1) / t_B1.clamp(min=0.05)
        return (
            -precision_B1
            * (x_B.mean((1, 2, 3))[:, None] / (1 - t_B1).clamp(min=0.05) - level_E).square()
        )


def three() -> Ensemble:
    experts = [Constant(level) for level in (-0.5, 0.0, 0.5)]
    return Ensemble(experts, Levels(), prior=(0.25, 0.25, 0.5), shape=(1, 4, 4))


def test_a_silo_alone_is_drawn_from_all_of_its_experts_and_no_others() -> None:
    effort = drawing.DrawingEffort(own=32, mixed=8, strategies=("lock",), steps=4)
    drawings = drawing.draw(three(), (0, 0, 1), effort)
    levels = [
        set((one.images.mean((1, 2, 3)) * 2).round().int().tolist())
        for one in drawings.own.values()
    ]
    assert levels == [{-1, 0}, {1}]
    assert [set(one.silo_N) for one in drawings.own.values()] == [{0}, {1}]


def test_router_along_t_ends_at_the_prior_and_begins_with_the_right_silo() -> None:
    effort = drawing.DrawingEffort(own=16, mixed=8, strategies=("lock",), steps=4)
    drawings = drawing.draw(three(), (0, 0, 1), effort)
    for silo, rows in drawings.posterior.items():
        assert rows[-1] == pytest.approx((0.5, 0.5))
        assert rows[0][silo] > 0.95
        assert all(sum(row) == pytest.approx(1) for row in rows)


def test_what_is_drawn_is_bounded_by_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "EFFORTS", USUAL_EFFORTS)
    for flops in [1.0, 1e6, 1e8, 1e9, 1e10, 1e12]:
        with case(flops=flops):
            chosen = drawing.affordable_effort(flops, 3, 3)
            costs = [effort.evaluations(3, 3) * flops for effort in drawing.EFFORTS]
            if chosen is None:
                assert min(costs) > drawing.MAX_FLOPS
            else:
                assert chosen.evaluations(3, 3) * flops <= drawing.MAX_FLOPS
                assert all(
                    cost > drawing.MAX_FLOPS for cost in costs[: drawing.EFFORTS.index(chosen)]
                )


def test_report_of_experts_too_large_to_draw_from_says_so(inputs: PageInput) -> None:
    assert "too large to draw from" in undrawn(inputs)[REPORT_NAME]
    assert "<img" not in undrawn(inputs)[REPORT_NAME]


def test_report_draws_nothing_from_experts_that_always_had_a_class(inputs: PageInput) -> None:
    condition = ClassCondition(num_classes=2, drop=0.0)
    always = inputs.with_plan(condition=condition)
    plan = always.contents.plan
    assert figures.draw_for_report(plan, inputs.manifest, inputs.ensemble) is None
    page = undrawn(always)[REPORT_NAME]
    assert "always trained with a class" in page and "--class 0" in page
    assert "too large to draw from" not in page


@pytest.mark.parametrize(("count", "num"), [(0, 128), (1, 7), (64, 128), (128, 128)])
def test_interval_of_a_share_is_wilsons(count: int, num: int) -> None:
    sample = drawing.DrawnImages(torch.zeros(num, 1, 1, 1), (0,) * count + (1,) * (num - count))
    share = figures.silo_shares(sample, (0.5, 0.5))[0]
    oracle = binomtest(count, num).proportion_ci(method="wilson")
    assert (share.value, share.low, share.high) == pytest.approx(
        (count / num, oracle.low, oracle.high), abs=1e-6
    )


def test_areas_of_a_stack_fill_the_chart_without_overlap() -> None:
    rows = torch.rand(
        21, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).softmax(1)
    areas = figures.stack_areas(rows.tolist(), 2)
    assert [area.silo for area in areas] == [2, 0, 1, 3]

    def surface(area: figures.PosteriorArea) -> float:
        x_P, y_P = np.array([point.split(",") for point in area.points.split()], dtype=float).T
        return abs(float(x_P @ np.roll(y_P, -1) - y_P @ np.roll(x_P, -1))) / 2

    weight_T = torch.full((21,), 1 / 20, dtype=torch.float64)
    weight_T[[0, -1]] /= 2
    expected = [float(weight_T @ rows[:, area.silo]) for area in areas]
    assert [
        surface(area) / (figures.CHART_WIDTH * figures.CHART_HEIGHT) for area in areas
    ] == pytest.approx(expected, abs=2e-3)


def test_large_images_are_made_small_and_other_channels_are_left_out() -> None:
    def first(images: Tensor) -> tuple[figures.ReleasePicture, ...]:
        return figures.inline_pictures(
            drawing.DrawnImages(images, (0,) * len(images)), 8, (0.0, 1.0)
        )

    (large,) = first(torch.rand(1, 3, 300, 600))
    decoded = Image.open(BytesIO(base64.b64decode(large.source.split(",")[1])))
    assert decoded.size == (MAX_PIXELS, MAX_PIXELS // 2)
    assert first(torch.rand(1, 2, 8, 8)) == ()
    (white,) = first(torch.ones(1, 1, 8, 8))
    assert (
        np.asarray(Image.open(BytesIO(base64.b64decode(white.source.split(",")[1])))).min() == 255
    )


@pytest.mark.parametrize("device", ["phone", "desktop"])
@pytest.mark.parametrize("dark", [False, True])
def test_report_fits_the_window_and_breaks_no_rule_of_its_own(
    browser: Chrome, drawn: Mapping[str, str], tmp_path: Path, device: str, dark: bool
) -> None:
    page = tmp_path / REPORT_NAME
    page.write_text(drawn[REPORT_NAME], "utf-8")
    show_as(browser, device, dark=dark)
    browser.get(page.as_uri())
    assert overflow(browser) == 0
    assert browser.execute_script("return [...document.images].every(one => one.naturalWidth > 0)")
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(one => one.name)"
    )
    assert [name for name in loaded if not name.startswith("data:")] == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
