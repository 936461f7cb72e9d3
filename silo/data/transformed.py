"""Takes the private pictures that a scan accepts through the plan's transform, once: all of them.

What a scan does not accept is left out, by the site's own rules. What the plan's transform does not take becomes blank
samples and stays: a plan chooses what that is, and must not find out by a number or a stop which pictures there are.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddm.errors import DataError
from ddm.images.array_files import Source, latents_at
from ddm.images.patients import keyed
from ddm.images.record import MOST_CAPTION
from ddm.images.store import Item, find_cohort, store_cohort
from ddm.images.transform import Transform
from ddm.io.files import replacing
from ddm.protocol.classes import Classes
from silo.config import ImagesSettings
from silo.data.problems import refuse_all
from silo.images.pictures import Pictures, Told
from silo.images.scan import FOLDER, Quarantine
from silo.images.walk import Scanned

LEFT_OUT = "left-out.csv"
BLANK = "blank"
NOT_TAKEN = f"{BLANK}: not taken by the plan"
Advance = Callable[[int, int], None]
_NAMED = 8  # classes in one message
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What a plan needs to know of each picture.

    Attributes:
        patients: whether it needs patients.
        classes: those that the site knows, where it needs classes; a label is stored as a number of theirs.
        captions: whether it needs texts.
        order: the key of the order of patients, see `ddm.images.patients.order_key`; needed with patients.
    """

    patients: bool = False
    classes: Classes | None = None
    captions: bool = False
    order: bytes = field(default=b"", repr=False)

    @property
    def told(self) -> tuple[Told, ...]:
        """The same, as columns."""
        asked: dict[Told, bool] = {
            "patient": self.patients,
            "label": self.classes is not None,
            "caption": self.captions,
        }
        return tuple(name for name, needed in asked.items() if needed)


def open_transformed(
    path: Path,
    transform: Transform,
    asked: Asked,
    folder: Path,
    settings: ImagesSettings | None = None,
    advance: Advance = lambda done, num: None,
) -> Source:
    """Return what the plan's transform makes of the pictures at `path`, from a copy in `folder` that is made once.

    Pictures are those that a scan accepts: bad files, and pictures that wait for a person, are left out. Each becomes
    `transform.num` samples, blank ones where the plan does not take it. `LEFT_OUT` in the folder of the scans lists
    both.

    Args:
        path: whatever `ddm.images.find.find_files` takes. Latents are returned as they are.
        transform: the plan's.
        asked: what the plan needs to know of each picture.
        folder: private to the worker.
        settings: the site's, for its images.
        advance: called with pictures done and in all, while they are decoded; files in place of pictures, and 0 in
            all, while they are scanned.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no picture that can be used; pictures without what the plan needs to know; or files that change
            meanwhile.
        SetupError: the decoders of these pictures are not installed.
        BusyError: another scan is at work.
        DiskError: too little room.
    """
    latents = latents_at(path)
    if latents is not None:
        return latents
    scans = folder / FOLDER
    scanning, settings = lambda done: advance(done, 0), settings or ImagesSettings()
    with Pictures.opened(path, scans, settings, scanning, order=asked.order) as pictures:
        classes = [asked.classes.num, asked.classes.names] if asked.classes else None
        ordered = [keyed(b"cohort", "", asked.order)] if asked.patients else []
        inputs = [pictures.digest(asked.told), asked.told, classes, *ordered]
        if (stored := find_cohort(folder, inputs, transform)) is not None:
            return stored
        with replacing(scans / LEFT_OUT, mode=0o600) as handle:
            making = _Making(pictures, asked, transform, Quarantine(handle), advance)
            num = making.check()
            _log.info("transforming %d images, once for this plan", num)
            made = store_cohort(
                folder, inputs, transform, making.items(num), most=num * transform.num, captions=asked.captions
            )
            making.close()
        _log.info("%d samples of %d images%s", len(made), num, making.words)
        if making.blank:
            _log.warning("%d of %d images are blank to this plan; %s says why", making.blank, num, LEFT_OUT)
        return made


@dataclass
class _Making:
    """One cohort in the making."""

    pictures: Pictures
    asked: Asked
    transform: Transform
    quarantine: Quarantine
    advance: Advance
    reasons: Counter[str] = field(default_factory=Counter)
    blank: int = 0

    def check(self) -> int:
        """Count the accepted pictures, before any is decoded, and note the others.

        Raises:
            DataError: none, or what the plan needs is not known of all of them: all that is missing at once.
        """
        num, lacking = 0, Counter[str]()
        for found in self.pictures:
            if found.reason is not None:
                self._leave_out(found, found.reason, found.detail)
                continue
            num += 1
            if self.asked.patients and self.pictures.patient(found) is None:
                lacking["patients"] += 1
            if self.asked.classes and self.asked.classes.number(found.label or "") is None:
                lacking["named" if found.label else "labels"] += 1
            if self.asked.captions:
                lacking["long"] += len(found.caption or "") > MOST_CAPTION
                lacking["captions"] += bool((found.caption or "").strip())
        if not num:
            remedy = "`silo scan` says of each file what is the matter."
            got = f"none{self.words}" if self.reasons else "no files at all"
            raise DataError("images", expected="at least one that can be used", got=got, remedy=remedy)
        refuse_all(list(self._problems(num, lacking)))
        return num

    def items(self, num: int) -> Iterator[Item]:
        """Decode the accepted pictures, and yield what the plan makes of each."""
        for done, (found, picture) in enumerate(self.pictures.decoded()):
            self.advance(min(done, num), num)
            if picture is None:
                samples = self.transform.blank
                self._note_blank(found, f"{BLANK}: {found.reason}", found.detail)
            else:
                samples, problem = self.transform.apply_to_any(picture)
                if problem is not None:  # its words are about sizes and values alone
                    self._note_blank(found, NOT_TAKEN, problem)
            classes = self.asked.classes
            yield Item(
                samples,
                patient=self.pictures.patient(found) if self.asked.patients else None,
                order=self.pictures.order(found) if self.asked.patients else None,
                label=classes.number(found.label or "") if classes else None,
                caption=(found.caption or "") if self.asked.captions else None,
            )

    def close(self) -> None:
        """Write the rest of the list of what is left out."""
        self.quarantine.close()

    @property
    def words(self) -> str:
        """What was left out and why; no name is in it."""
        most = ", ".join(f"{num} {reason}" for reason, num in self.reasons.most_common(_NAMED))
        return f"; left out: {most}" if most else ""

    def _leave_out(self, found: Scanned, reason: str, detail: str) -> None:
        self.reasons[reason] += 1
        self.quarantine.add(found, reason, detail)

    def _note_blank(self, found: Scanned, reason: str, detail: str) -> None:
        self.blank += 1
        self.quarantine.add(found, reason, detail)

    def _problems(self, num: int, lacking: Counter[str]) -> Iterator[DataError]:
        """Yield what is missing; no cell of a table is quoted."""
        for name in ("patients", "labels"):
            if lacking[name]:
                got = f"none for {lacking[name]} of {num} images"
                yield DataError(name, expected=f"a {name[:-1]} for each image", got=got, remedy=_REMEDIES[name])
        if lacking["named"] and self.asked.classes:
            got = f"others at {lacking['named']} of {num} images"
            expected = f"classes of the plan, {self.asked.classes.words(_NAMED)}"
            yield DataError("labels", expected=expected, got=got, remedy=_REMEDIES["named"])
        if lacking["long"]:
            got = f"longer ones at {lacking['long']} of {num} images"
            yield DataError("captions", expected=f"at most {MOST_CAPTION} characters each", got=got)
        if self.asked.captions and not lacking["captions"]:
            remedy = "Put them into a column caption of the images' table."
            yield DataError("captions", expected="a text for at least one image", got="blank ones alone", remedy=remedy)


_REMEDIES = {
    "patients": "Give every image its patient, in a column patient of the images' table or an array patients; one "
    "without could belong to a patient who is counted already. Or leave its row out.",
    "labels": "Give every image its class, in a column label of the images' table; or leave its row out.",
    "named": "Write the classes by name, or by number as data.classes in policy.toml, else the plan, counts them; "
    "`silo scan` counts the labels of this site.",
}
