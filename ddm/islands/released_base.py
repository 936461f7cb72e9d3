"""Opens the base of islands that is an expert of an own earlier release."""

from pathlib import Path

from ddm.errors import PolicyError
from ddm.islands.recipe import IslandsRecipe
from ddm.loading.release import open_release
from ddm.planning.bases import BaseSource
from ddm.planning.recipe import ReleaseBaseRecipe
from ddm.planning.released_base import expert_source, is_of_islands


def open_released_base(recipe: IslandsRecipe) -> BaseSource | None:
    """Verify the earlier release that a recipe names, and return its expert; None for a recipe without one.

    Raises:
        PolicyError: a release of a federation.
        SetupError: the release has no such expert.
        TrustError, FormatError: see `ddm.loading.release.open_release`.
    """
    chosen = recipe.base
    if not isinstance(chosen, ReleaseBaseRecipe) or chosen.root is None or chosen.expert is None:
        return None
    # It may have been replaced by later versions since, and its timestamp may be over.
    release = open_release(Path(chosen.release), root=Path(chosen.root), state=None, archived=True)
    # Silos agree that their experts serve as the base of their federation's plans, and may take that back there.
    if not is_of_islands(release):
        raise PolicyError(
            f"recipe, base.release {chosen.release}",
            expected="a release of islands",
            got="a release of a federation, whose silos agree to a base for their federation's plans alone",
            remedy="Start from a release of your own islands. A plan of the federation starts "
            "from it with --from-release.",
        )
    return expert_source(release, chosen.expert, frozenset())
