"""A picture as a scan judges it, or a file that gives none."""

from dataclasses import dataclass

from ddm.images.record import PictureRecord
from ddm.images.table import TableRow


@dataclass(frozen=True)
class ScannedImage:
    """A picture, or a file that gives none. All of it stays in private memory.

    Attributes:
        path: its file.
        row: what a table says about the file.
        place: number of the picture in its file, from 0; None for a whole file.
        record: the record of the picture; None for a whole file.
        reason: why it is not accepted; None if it is.
        detail: more about the reason.
        part: the part of the data set that it belongs to, such as train or test, as `ddm.images.column_names` names it.
        order: secret rank of the patient whom its file names, if it was decoded with values.
    """

    path: str
    row: TableRow | None
    place: int | None = None
    record: PictureRecord | None = None
    reason: str | None = None
    detail: str = ""
    part: str | None = None
    order: str | None = None

    @property
    def label(self) -> str | None:
        """Its class: what the table says, else what the file says."""
        return self._column("label")

    @property
    def caption(self) -> str | None:
        """Its text: what the table says, else what the file says."""
        return self._column("caption")

    def _column(self, name: str) -> str | None:
        in_table = getattr(self.row, name, None)
        return in_table or getattr(self.record, name, None) or None
