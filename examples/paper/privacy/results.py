"""The measurements of one run, in the form in which they are stored between runs."""

from pydantic import BaseModel, ConfigDict

from examples.paper.privacy.measure import RouterMeasurements


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Presets(_Kept):
    """How much work goes into one seed."""

    encoders: tuple[str, ...]
    epsilons: tuple[float, ...]
    draws: int
    encoder_steps: int
    reference_steps: int
    learned_steps: int
    expert_steps: int
    samples_steps: int
    num_samples: int
    attack_draws: int


def presets_for(dataset: str, *, quick: bool) -> Presets:
    """Return the work for a data set."""
    large = dataset == "fashion-mnist"
    full = Presets(
        encoders=("timm", "hog", "pca") if large else ("pca",),
        epsilons=(0.1, 0.3, 1.0, 4.0),
        draws=2,
        encoder_steps=400 if large else 0,
        reference_steps=6000 if large else 2000,
        learned_steps=600,
        expert_steps=1000 if large else 1500,
        samples_steps=1000,
        num_samples=1024,
        attack_draws=100_000,
    )
    if not quick:
        return full
    few = {
        "encoder_steps": 20,
        "reference_steps": 50,
        "learned_steps": 40,
        "expert_steps": 20,
        "samples_steps": 20,
    }
    return full.model_copy(
        update=few
        | {"epsilons": (0.3, 1.0, 4.0), "draws": 2, "num_samples": 64, "attack_draws": 20_000}
    )


class FamilyRecord(_Kept):
    """One router on one world.

    `difference_T` is its cross-entropy less that of counts at the same total epsilon, paired by image;
    `difference_error_T` its standard error over images.
    """

    family: str
    epsilon: float | None
    draw: int
    note: str = ""
    temperature: float = 1.0
    loss_T: tuple[float, ...]
    gain: float
    accuracy_T: tuple[float, ...]
    share_error_T: tuple[float, ...]
    difference_T: tuple[float, ...] = ()
    difference_error_T: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        family: str,
        epsilon: float | None,
        draw: int,
        found: RouterMeasurements,
        prior: RouterMeasurements,
        *,
        against: RouterMeasurements | None = None,
        note: str = "",
        temperature: float = 1.0,
    ) -> "FamilyRecord":
        """Summarise a measurement; `gain` is the prior's cross-entropy less the router's, averaged over t."""
        paired_TN = found.loss_TN - against.loss_TN if against else None
        return cls(
            family=family,
            epsilon=epsilon,
            draw=draw,
            note=note,
            temperature=temperature,
            loss_T=tuple(found.loss_T),
            gain=float((prior.loss_TN - found.loss_TN).mean()),
            accuracy_T=tuple(found.accuracy_T),
            share_error_T=tuple(found.share_error_T),
            difference_T=() if paired_TN is None else tuple(paired_TN.mean(1).tolist()),
            difference_error_T=()
            if paired_TN is None
            else tuple((paired_TN.std(1) / len(paired_TN.T) ** 0.5).tolist()),
        )


class Shares(_Kept):
    """How far the silos' shares of samples under the private router are from those under the exact one.

    `within` is the distance of shares within public clusters as well; `controls` those of routers that must stand out.
    """

    strategy: str
    distance: float
    sampling_error: float
    within: float
    within_error: float
    controls: dict[str, float]


class Empirical(_Kept):
    """What a membership attack shows of one statistic: a 99.9% lower bound on its epsilon."""

    statistic: str
    claim: float
    bound: float
    bound_quartered: float


class Reidentification(_Kept):
    """How often released sketches are matched to their images among `num`."""

    num: int
    epsilon: float
    average: float
    outlying: float


class SeedResult(_Kept):
    """Everything measured on one world."""

    seed: int
    commit: str
    presets: Presets
    records: tuple[FamilyRecord, ...]
    shares: tuple[Shares, ...]
    empirical: tuple[Empirical, ...]
    reidentification: Reidentification | None
