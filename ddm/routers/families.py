"""Joins the settings of a plan's router to the family that they are of."""

from ddm.protocol.routers import CountsSettings, LearnedSettings, RouterSettings, SamplesSettings
from ddm.routers.counts_family import CountsFamily
from ddm.routers.family import RouterFamily
from ddm.routers.learned import LearnedFamily
from ddm.routers.samples import SamplesFamily


def family_of(settings: RouterSettings) -> RouterFamily:
    """Return the family of a plan's router."""
    match settings:
        case CountsSettings():
            return CountsFamily()
        case LearnedSettings():
            return LearnedFamily(settings)
        case SamplesSettings():
            return SamplesFamily(settings)
