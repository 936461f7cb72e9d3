"""Card and report of a release with hundreds of silos: grouped and shortened, and nothing grave left out."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from selenium.webdriver import Chrome

from ddm.protocol.submission import Submission
from ddm.publishing.contents import ReleaseMember
from ddm.publishing.drawing import Drawing, DrawnImages, largest_silos
from ddm.publishing.members import MAX_DETAILED, MAX_NAMED
from ddm.publishing.pages import CARD_NAME, REPORT_NAME, render_pages
from tests.conftest import PublishedRelease
from tests.ddm.publishing.test_pages import PageInput, front_matter, page_input
from tests.support.browser import overflow, show_as
from tests.support.pages import PageReader

NUM_SILOS = 256
NUM_TIMES = 21


@pytest.fixture(scope="module")
def inputs(published_once: PublishedRelease) -> PageInput:
    return page_input(published_once)


def with_silos(inputs: PageInput, num_silos: int) -> PageInput:
    """The release of so many silos, each with the documents of the first one under a name of its own.

    Three of them differ: one brings more, one was admitted by the operator, and one has no isolation.
    """
    manifest = inputs.manifest
    member = inputs.contents.members[0]
    assert isinstance(member.document, Submission)
    published = manifest.silos[0]
    expert = manifest.experts[0]
    silos = []
    experts = []
    members = []
    for number in range(num_silos):
        silo_id = f"silo{number:04d}"
        flags = ("copy",) if number == 1 else ()
        changes: dict[str, object] = {"silo_id": silo_id}
        if number == 1:
            changes["admitted"] = True
        changes["isolation"] = "none" if number == 2 else "users"
        silo = published.model_copy(update=changes)
        document = member.document.model_copy(
            update={"silo_id": silo_id, "num_units": 500 if number == 0 else 40 + number % 2}
        )
        prior = 2.0 if number == 0 else 1.0
        silos.append(silo)
        members.append(ReleaseMember(silo, document, b""))
        experts.append(
            expert.model_copy(
                update={
                    "silo_id": silo_id,
                    "expert_id": silo_id,
                    "flags": flags,
                    "prior": prior / (num_silos + 1),
                }
            )
        )
    plan = inputs.contents.plan
    names = tuple(silo.silo_id for silo in silos)
    plan = plan.model_copy(
        update={"silos": names, "agreed": dict.fromkeys(names, next(iter(plan.agreed.values())))}
    )
    changed = manifest.model_copy(update={"silos": tuple(silos), "experts": tuple(experts)})
    return replace(inputs, manifest=changed).with_contents(plan=plan, members=tuple(members))


def made_up_drawing(inputs: PageInput) -> Drawing:
    """Images that are noise, of the silos that a report shows, and a router that knows nothing."""
    num_silos = len(inputs.manifest.silos)
    priors = list(inputs.manifest.silo_priors().values())
    own = {}
    for silo in largest_silos(priors, range(num_silos)):
        own[silo] = DrawnImages(torch.rand(8, 1, 4, 4), (silo,) * 8)
    mixed = DrawnImages(torch.rand(32, 1, 4, 4), tuple(n % num_silos for n in range(32)))
    row = tuple(priors)
    posterior = dict.fromkeys(own, (row,) * NUM_TIMES)
    return Drawing(
        seed=0, steps=24, solver="midpoint", own=own, mixed={"lock": mixed}, posterior=posterior
    )


def pages_of(inputs: PageInput) -> Mapping[str, str]:
    return render_pages(
        inputs.contents, inputs.manifest, inputs.root_digest, made_up_drawing(inputs)
    )


@pytest.fixture(scope="module")
def pages(inputs: PageInput) -> Mapping[str, str]:
    return pages_of(with_silos(inputs, NUM_SILOS))


def test_card_of_many_silos_has_a_row_for_each_group_and_not_for_each_silo(
    pages: Mapping[str, str],
) -> None:
    card = pages[CARD_NAME]
    assert front_matter(card)["num_silos"] == NUM_SILOS
    assert "silos" not in front_matter(card)
    assert len(card.splitlines()) < 150
    # The silo without isolation is in a row of its own; all others have the same terms.
    assert f"| {NUM_SILOS - 1} |" in card
    assert "| 1 |" in card
    assert f"and {NUM_SILOS - 1 - MAX_NAMED} more" in card


def test_card_and_report_of_many_silos_name_each_of_which_a_reader_should_know(
    pages: Mapping[str, str],
) -> None:
    for page in (pages[CARD_NAME], PageReader(pages[REPORT_NAME]).text):
        admitted = next(line for line in page.splitlines() if "admitted by the operator" in line)
        assert "copies another silo" in admitted
        assert "silo0001" in page
        assert "process with network access could read the data: silo0002" in page
        assert "made-up images: all silos" in page
        # Its share is the largest.
        assert "silo0000" in page


def test_report_of_many_silos_lists_each_of_them_with_its_key_where_a_reader_opens_it(
    inputs: PageInput, pages: Mapping[str, str]
) -> None:
    report = pages[REPORT_NAME]
    assert report.count("<details>") == 2
    rows = report.split("<details>")
    for part in rows[1:]:
        folded = part.split("</details>")[0]
        assert all(f"silo{number:04d}" in folded for number in range(NUM_SILOS))
    # Outside of what is folded away, few of them are named.
    shown = rows[0] + "".join(part.split("</details>")[1] for part in rows[1:])
    named = {number for number in range(NUM_SILOS) if f"silo{number:04d}" in shown}
    assert len(named) < 60


def test_report_grows_by_a_row_and_a_key_with_each_further_silo(inputs: PageInput) -> None:
    sizes = [
        len(pages_of(with_silos(inputs, num_silos))[REPORT_NAME]) for num_silos in (64, 128, 256)
    ]
    first_growth = sizes[1] - sizes[0]
    second_growth = sizes[2] - sizes[1]
    # Twice as many more silos, twice the growth: no chart has an area of each silo for each other one.
    assert second_growth < 2.2 * first_growth
    assert second_growth / 128 < 3000


def test_pages_describe_each_silo_up_to_the_number_that_a_person_reads(inputs: PageInput) -> None:
    few = pages_of(with_silos(inputs, MAX_DETAILED))
    many = pages_of(with_silos(inputs, MAX_DETAILED + 1))
    assert len(front_matter(few[CARD_NAME])["silos"]) == MAX_DETAILED
    assert "<details>" not in few[REPORT_NAME]
    assert "<details>" in many[REPORT_NAME]


def test_tables_of_a_card_of_many_silos_are_tables(pages: Mapping[str, str]) -> None:
    """Of groups, of the largest shares, and of calibration; a bar that is escaped would leave a line of text."""
    body = pages[CARD_NAME].split("---\n", 2)[2]
    html = MarkdownIt("commonmark").enable("table").render(body)
    assert html.count("<table>") == 3
    assert not re.search(r"^(<p>)?\|", html, re.MULTILINE)


def test_report_of_many_silos_fits_a_phone(
    pages: Mapping[str, str], browser: Chrome, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages[REPORT_NAME], "utf-8")
    for device in ("phone", "desktop"):
        show_as(browser, device)
        browser.get(path.as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert overflow(browser) == 0
