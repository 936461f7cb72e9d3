"""The options on which experts samples follow: strategies, their settings, and the weights of silos."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from ddm.cli.options import HOW
from ddm.cli.settings import DrawingSettings
from ddm.errors import SetupError
from ddm.sampling.silo_weights import silos_with_data, weights_of_experts
from ddm.sampling.strategies import STRATEGIES, strategy_named

if TYPE_CHECKING:
    from ddm.protocol.manifest import Manifest
    from ddm.sampling.strategies import Strategy

# How a strategy's setting is written on the command line.
FLAGS = {
    "tau": "--tau",
    "prefix": "--prefix",
    "k": "--top-k",
    "mass": "--set mass",
    "least": "--set least",
}


STRATEGY_NAMES = click.Choice(list(STRATEGIES))


class PrefixChoice(StrEnum):
    """What lock does before it locks."""

    SAMPLE = "sample"
    FULL = "full"


TauOption = Annotated[
    float | None,
    typer.Option(
        "--tau",
        min=0.0,
        max=1.0,
        help="lock: the time t_lock; at 1, the default, no router is needed.",
        rich_help_panel=HOW,
    ),
]
PrefixOption = Annotated[
    PrefixChoice | None,
    typer.Option("--prefix", help="lock: what to do before t_lock.", rich_help_panel=HOW),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k", min=1, help="top-k: mix this many experts; default 2.", rich_help_panel=HOW
    ),
]
PriorOption = Annotated[
    str,
    typer.Option(
        "--prior",
        help="Prior of the silos: data, equal, or ID=W,...; 0 leaves a silo out.",
        rich_help_panel=HOW,
    ),
]


@dataclass(frozen=True)
class StrategyOptions:
    """The settings of strategies, and the weights of silos."""

    tau: TauOption = None
    prefix: PrefixOption = None
    top_k: TopKOption = None
    prior: PriorOption = "data"

    def settings(self, rare: DrawingSettings) -> dict[str, Any]:
        """Return the settings that were given, by their names in `ddm.sampling.strategies`."""
        settings = {
            "tau": self.tau,
            "prefix": self.prefix and PrefixChoice(self.prefix).value,
            "k": self.top_k,
            "mass": rare.mass,
            "least": rare.least,
        }
        return {name: value for name, value in settings.items() if value is not None}


def choose_strategy(name: str, settings: dict[str, Any]) -> "Strategy":
    """Return the strategy, and refuse settings that mean nothing to it."""
    for setting, value in settings.items():
        if setting not in STRATEGIES[name].settings:
            owners = [other for other, kind in STRATEGIES.items() if setting in kind.settings]
            raise SetupError(
                FLAGS[setting],
                expected=f"--strategy {owners[0]}",
                got=f"{value} with --strategy {name}",
            )
    # A prefix before t_lock = 1 would be no step at all.
    if settings.get("prefix") and settings.get("tau", 1.0) == 1.0:
        raise SetupError(
            "--prefix",
            expected="--tau below 1",
            got="--tau 1, where lock draws its experts from the prior at once and nothing comes before",
        )
    return strategy_named(name, **settings)


def read_priors(
    manifest: "Manifest", prior: str, class_prior: str
) -> tuple[list[float], list[float] | None]:
    """Return each expert's weight, and its share of the class or text if one was declared."""
    silo_ids = [expert.silo_id for expert in manifest.experts]
    data_prior = [expert.prior for expert in manifest.experts]
    weights = expert_weights("--prior", prior, silo_ids, data_prior)
    if class_prior == "data":
        # None leaves it to what the silos signed: their class counts.
        return weights, None
    return weights, expert_weights("--set class-prior", class_prior, silo_ids, data_prior)


def expert_weights(
    flag: str, text: str, silo_ids: list[str], data_prior: list[float]
) -> list[float]:
    """Return a weight for each expert, as an option states the weights of silos; see `ddm.sampling.silo_weights`."""
    if text in ("data", "equal"):
        return weights_of_experts(text, silo_ids, data_prior)
    silo_weights = _read_silo_weights(flag, text, silos_with_data(silo_ids, data_prior))
    return weights_of_experts(silo_weights, silo_ids, data_prior)


def _read_silo_weights(flag: str, text: str, silo_ids: list[str]) -> dict[str, float]:
    """Read ID=WEIGHT,...; silos that are not named have the weight 0."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        silo_id, _, number = part.strip().partition("=")
        try:
            # `float` also reads "nan" and "inf", which the range below refuses.
            weight = float(number)
        except ValueError:
            # Refused below, with the same message as a weight that is out of range.
            weight = -1.0
        # A silo named twice may be a typing error in one of the names.
        if silo_id not in silo_ids or silo_id in weights or not 0.0 <= weight < float("inf"):
            raise SetupError(
                flag,
                expected=f"data, equal, or ID=WEIGHT,... with each ID once, among {', '.join(silo_ids)}",
                got=repr(part[:60]),
            )
        weights[silo_id] = weight
    if sum(weights.values()) <= 0:
        raise SetupError(flag, expected="at least one weight above 0", got=repr(text[:60]))
    return dict.fromkeys(silo_ids, 0.0) | weights
