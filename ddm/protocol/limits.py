"""What a plan demands of the leak audit, and bounds on what a silo's part may take. A part of the plan."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Model, NumBytes, NumImages

Verdict = Literal["pass", "fail", "inconclusive"]
"""What an audit says about an expert, before anybody takes responsibility for it."""


class Audit(Model):
    """The limits of the leak audit that gates what leaves a silo; see `ddm.audit.verdict` for what they decide.

    Attributes:
        required: whether the audit must pass, or be waived.
        min_holdout_units: fewest held-out units with which the audit is conclusive.
        max_near_copy_rate: largest share of samples that are nearly copies of a training image.
        max_mia_auc: largest area under the curve of the membership attacks that decide.
        max_mia_tpr: largest share of members that these find at 1% false positives; a document leaves out 0.1.
    """

    required: bool
    # 300 units give an area under the curve to within 0.05, and three false positives at 1% (docs/adr/0054).
    min_holdout_units: NumImages = 300
    max_near_copy_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    max_mia_auc: Annotated[float, Field(ge=0.5, le=1.0)] = 0.6
    max_mia_tpr: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class SubmissionLimits(Model):
    """Bounds on the size of a silo's submission and on its training time.

    Attributes:
        expert_bytes: size of the largest file of an expert.
        statistic_bytes: size of the largest file of a statistic.
        train_s: seconds of training, of all experts of a silo together.
        gpu_hours: GPU hours to hold against each site's policy; they are not measured.
    """

    expert_bytes: NumBytes
    statistic_bytes: NumBytes
    train_s: Annotated[int, Field(gt=0, le=10**10)]
    gpu_hours: Annotated[float, Field(ge=0.0, le=1e7)]
