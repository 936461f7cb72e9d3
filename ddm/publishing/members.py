"""What the pages of a release say about its silos or islands: about each, or about groups where there are many.

A federation may have a thousand silos. Pages that described each of them would not be read, so that from `MAX_DETAILED`
members on those with the same terms share a row, and what a reader should know about some of them is one remark with
their names. The manifest, which is signed beside the pages, states everything of everybody.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ddm.protocol.growth import describe_standing
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedSilo, ScreeningRule
from ddm.protocol.submission import Submission
from ddm.publishing.contents import ReleaseContents

# Each of this many is described by itself.
MAX_DETAILED = 16
MAX_NAMED = 12

# What the rules of screening found, for the pages.
FLAG_WORDS: Mapping[ScreeningRule, str] = {
    "alike_images": "its images are nearly one image",
    "answers_zero": "answers 0 to every input",
    "broken_images": "its images are not finite",
    "copy": "copies another silo's expert",
    "far_images": "its images are unlike any public image",
    "high_loss": "a higher loss on public images than answering 0",
    "high_loss_once": "an implausibly high loss at a single t",
    "large_weights": "larger weights than training can produce",
    "not_learnt": "no better than a constant near t = 1",
    "refused_before": "a person refused an earlier submission of its silo",
    "stands_apart": "a much higher loss than the other experts",
    "unchanged": "the base that training started from, hardly changed",
}


@dataclass(frozen=True)
class MemberSection:
    """What the pages say about one silo or island.

    Attributes:
        index: its place in the manifest.
        published: its entry in the manifest.
        document: what it signed.
        prior: its share.
        flagged_experts: its experts that screening flagged, each with the reasons in words.
        standing: how it takes part, in words, in a plan that carries experts over; else empty.
        value: the column's value that all images of an island share; else empty.
    """

    index: int
    published: PublishedSilo
    document: Submission | Island
    prior: float
    flagged_experts: tuple[tuple[str, str], ...] = ()
    standing: str = ""
    value: str = ""

    @property
    def silo_id(self) -> str:
        """Its name."""
        return self.published.silo_id


@dataclass(frozen=True)
class MemberGroup:
    """Silos whose rows on the pages say the same, except for their numbers of units and their shares.

    Attributes:
        members: the silos, in the manifest's order.
    """

    members: tuple[MemberSection, ...]

    @property
    def first(self) -> MemberSection:
        """One of them, whose terms are those of all."""
        return self.members[0]

    @property
    def names(self) -> str:
        """Their names, shortened."""
        return shorten_names([part.silo_id for part in self.members])

    @property
    def prior(self) -> float:
        """Their share together."""
        return sum(part.prior for part in self.members)

    @property
    def units(self) -> str:
        """The numbers of units that they state: one number, or the smallest and the largest."""
        numbers = [part.document.num_units for part in self.members]
        if min(numbers) == max(numbers):
            return f"{numbers[0]}"
        return f"{min(numbers)} to {max(numbers)}"


@dataclass(frozen=True)
class Remark:
    """What a reader should know about some silos: in words, and their names, shortened."""

    words: str
    names: str


def shorten_names(names: Sequence[str]) -> str:
    """Join names; of many, the first ones and the number of all others."""
    shown = ", ".join(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        shown += f" and {len(names) - MAX_NAMED} more"
    return shown


def group_members(members: Sequence[MemberSection]) -> tuple[MemberGroup, ...]:
    """Group the silos with the same terms, the largest group first."""
    groups: dict[object, list[MemberSection]] = {}
    for part in members:
        groups.setdefault(_terms(part), []).append(part)
    by_size = sorted(groups.values(), key=lambda group: -len(group))
    return tuple(MemberGroup(tuple(group)) for group in by_size)


def _terms(part: MemberSection) -> tuple[object, ...]:
    """Return what the pages say about a silo besides its name, key, number of units and share."""
    document = part.document
    statistics: tuple[object, ...] = ()
    if isinstance(document, Submission):
        statistics = tuple(
            (statistic.kind, statistic.epsilon, statistic.delta)
            for statistic in document.statistics
        )
    published = part.published
    return (
        published.epsilon,
        published.delta,
        published.isolation,
        published.audit,
        statistics,
        tuple(str(expert.privacy) for expert in document.experts),
    )


class _Gravity(IntEnum):
    """In which order remarks are listed."""

    FAILED_AUDIT = 0
    ADMITTED = 1
    FEWER_UNITS = 2
    WAIVED_AUDIT = 3
    NO_ISOLATION = 4
    ABSENT = 5
    STANDING = 6


def remarks_on(
    members: Sequence[MemberSection], absent: Sequence[tuple[str, str]]
) -> tuple[Remark, ...]:
    """Return what a reader should know about single silos, the same words once, the gravest first.

    Args:
        members: those of the release.
        absent: silos of the plan that are not in it, each with the reason.
    """
    silos_of_remark: dict[tuple[_Gravity, str], list[str]] = {}
    for part in members:
        for remark in _remarks_on_member(part):
            silos_of_remark.setdefault(remark, []).append(part.silo_id)
    for silo_id, reason in absent:
        words = f"{reason.capitalize()}: this version contains no expert of it"
        silos_of_remark.setdefault((_Gravity.ABSENT, words), []).append(silo_id)
    remarks = []
    for (_, words), silo_ids in sorted(silos_of_remark.items()):
        names = shorten_names(silo_ids)
        if len(silo_ids) == len(members):
            names = "all silos"
        remarks.append(Remark(words, names))
    return tuple(remarks)


def _remarks_on_member(part: MemberSection) -> Iterator[tuple[_Gravity, str]]:
    """Yield each remark on a silo, with its gravity."""
    document = part.document
    if isinstance(document, Submission):
        if document.approval is not None and document.approval.despite_fail is not None:
            responsible = document.approval.despite_fail
            words = f"Leak audit failed; its {responsible.role} let the experts leave: {responsible.reason}"
            yield _Gravity.FAILED_AUDIT, words
        if document.audit.waiver is not None:
            waiver = document.audit.waiver
            yield _Gravity.WAIVED_AUDIT, f"Leak audit waived by its {waiver.role}: {waiver.reason}"
    if part.published.admitted:
        reasons = ", ".join(dict.fromkeys(words for _, words in part.flagged_experts))
        words = f"Flagged by screening ({reasons}) and admitted by the operator"
        yield _Gravity.ADMITTED, words
    if part.published.units_reason:
        words = f"Counts as fewer units than it states: {part.published.units_reason}"
        yield _Gravity.FEWER_UNITS, words
    if part.published.isolation == "none":
        words = "No isolation: the process with network access could read the data"
        yield _Gravity.NO_ISOLATION, words
    if part.standing:
        yield _Gravity.STANDING, part.standing[0].upper() + part.standing[1:]


def member_sections(contents: ReleaseContents, manifest: Manifest) -> tuple[MemberSection, ...]:
    """Join the manifest's entries with what each silo or island signed, in the manifest's order."""
    # The manifest is the order in which everything else lists the silos too.
    documents = {member.silo_id: member.document for member in contents.members}
    priors = manifest.silo_priors()
    values: Mapping[str, str] = {}
    if contents.division is not None:
        values = contents.division.values
    flagged_experts = _flagged_experts(manifest)
    sections = []
    for index, published in enumerate(manifest.silos):
        silo_id = published.silo_id
        sections.append(
            MemberSection(
                index=index,
                published=published,
                document=documents[silo_id],
                prior=priors[silo_id],
                flagged_experts=tuple(flagged_experts.get(silo_id, ())),
                standing=describe_standing(published, contents.plan),
                value=values.get(silo_id, ""),
            )
        )
    return tuple(sections)


def _flagged_experts(manifest: Manifest) -> Mapping[str, list[tuple[str, str]]]:
    """Return each flagged expert with the reasons in words, by its silo."""
    flagged: dict[str, list[tuple[str, str]]] = {}
    for expert in manifest.experts:
        if expert.flags:
            reasons = "; ".join(FLAG_WORDS[flag] for flag in expert.flags)
            flagged.setdefault(expert.silo_id, []).append((expert.expert_id, reasons))
    return flagged
