"""What a plan keeps of its public images beside them: the labels that a samples router learns from."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aggregator.config import PUBLIC_NAME, Federation

CLASSES = "fitted_classes"
SILOS = "fitted_silos"
CAPTIONS = "fitted_captions"
TEXTS = "fitted_texts"
_NAMES = (CLASSES, SILOS, CAPTIONS, TEXTS)

PublicColumns = Mapping[str, NDArray[np.generic]]
"""Columns of the public images that a plan is fitted on, one value each, by the names above. Texts are the vectors of
distinct captions, which captions number."""


def kept_columns(federation: Federation, plan_id: str) -> PublicColumns:
    """Return the columns that a plan keeps; empty for a plan whose router needs none."""
    with np.load(federation.plan_folder(plan_id) / PUBLIC_NAME, allow_pickle=False) as archive:
        return {name: archive[name] for name in _NAMES if name in archive.files}
