"""Writes the card of a repository of the Hub: that of the release, with what the Hub asks for besides.

The release's own card, `targets/<plan>/README.md`, is signed and stays as it is. Its copy at the repository's root is
not: it names the repository, and what only the person who pushes knows.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ddm.errors import SetupError
from ddm.fetching.address import HubAddress

# Names of models and data sets of the Hub; some old ones have no owner.
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:-]{0,63}")
_FRONT_MATTER = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
_TAGS_LINE = re.compile(r"^tags: \[(.*)\]$", re.MULTILINE)


@dataclass(frozen=True)
class CardAdditions:
    """What the Hub's card says beyond the release's own.

    Attributes:
        base_models: names of models of the Hub from which training started.
        data_sets: names of data sets of the Hub that experts were trained on.
        tags: further tags.

    Raises:
        SetupError: a name that is not valid on the Hub.
    """

    base_models: Sequence[str] = ()
    data_sets: Sequence[str] = ()
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        for option, names in (("--base-model", self.base_models), ("--dataset", self.data_sets)):
            for name in names:
                if _HUB_NAME.fullmatch(name) is None:
                    _refuse(option, "OWNER/NAME of the Hub", name)
        for tag in self.tags:
            if _TAG.fullmatch(tag) is None:
                _refuse("--tag", "letters, digits and single marks", tag)


def _refuse(option: str, expected: str, text: str) -> NoReturn:
    raise SetupError(option, expected=expected, got=ascii(text[:100]))


def hub_card(
    release_card: str,
    plan_id: str,
    address: HubAddress,
    additions: CardAdditions = CardAdditions(),
) -> str:
    """Return the text of the card at the root of a repository.

    Args:
        release_card: the release's own card, with its front matter in YAML.
        plan_id: its plan.
        address: the repository.
        additions: what it says beyond.

    Raises:
        SetupError: the release's card has no front matter.
    """
    match = _FRONT_MATTER.match(release_card)
    if match is None:
        raise SetupError(
            f"targets/{plan_id}/README.md",
            expected="a card that begins with front matter between two lines of ---",
            got="a card without it",
            remedy="Publish the release again with this version, then push it.",
        )
    # JSON is YAML, and quotes whatever a name may hold.
    front_matter = _add_tags(match[1], additions.tags)
    if additions.base_models:
        front_matter += f"base_model: {json.dumps(list(additions.base_models))}\n"
    if additions.data_sets:
        front_matter += f"datasets: {json.dumps(list(additions.data_sets))}\n"
    return (
        f"---\n{front_matter}---\n\n{_introduction(plan_id, address)}{release_card[match.end() :]}"
    )


def _add_tags(front_matter: str, tags: Sequence[str]) -> str:
    if not tags:
        return front_matter
    written = ", ".join(json.dumps(tag) for tag in tags)
    return _TAGS_LINE.sub(lambda line: f"tags: [{line[1]}, {written}]", front_matter, count=1)


def _introduction(plan_id: str, address: HubAddress) -> str:
    name = f"hf://{address.repository}"
    return (
        f"> This page is not signed; the release's own card is `targets/{plan_id}/README.md`, beside `report.html`.\n"
        "> Fetch the files that are signed, and no others, with Archipelago:\n"
        ">\n"
        "> ```console\n"
        f"> $ ddm fetch {name} release --root 1.root.json\n"
        f"> $ ddm sample {name} --root 1.root.json --num 16 --out samples.png\n"
        "> ```\n"
    )
