"""What decoders are asked and what comes back: a file, the pictures of it as they are decoded, and its end."""

from dataclasses import dataclass, field

from ddm.images.picture import Picture
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord


@dataclass(frozen=True)
class Job:
    """A file to be decoded.

    Attributes:
        path: the file.
        files: it, and what belongs to it, such as labels in a file beside it.
        num_bytes: of them all.
        digest: of what was decoded before; the same content is then not decoded again.
    """

    path: str
    files: tuple[str, ...]
    num_bytes: int
    digest: str = ""


@dataclass(frozen=True)
class Found:
    """One picture of a job, as it is decoded.

    Attributes:
        job: whose.
        seen: what is kept of it.
        picture: its values, where they were asked for.
        order: of its patient, see `ddm.images.patients.order_of`, where it was asked for and the file names one.
    """

    job: Job
    seen: PictureRecord
    picture: Picture | None = field(default=None, repr=False)
    order: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Done:
    """The end of a job.

    Attributes:
        job: whose.
        digest: of its files; empty where they could not be read.
        same: its content is that of `Job.digest`, and was not decoded again.
        reason: why its file gives no picture, or no more of them.
        detail: more of that.
    """

    job: Job
    digest: str = ""
    same: bool = False
    reason: Reason | None = None
    detail: str = ""
