"""How often the leak audit passes, fails or decides nothing, by the number of units held out.

    python -m examples.paper.leaks.power --out power.csv

Scores are drawn, and judged by the audit's own code. The errors of all attacks on an image have a common part, and are
smaller for members by as much as gives the attacks' sum the area under the ROC curve that the table names.
"""

import argparse
import csv
import sys
from collections import Counter
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import NormalDist

import torch

from ddm.audit.attacks import names
from ddm.audit.membership import Attack, Membership, UnitScores, measure_membership
from ddm.audit.verdict import MeasuredLeaks, judge
from ddm.evaluation.intervals import Estimate, wilson
from ddm.protocol.limits import Audit
from ddm.system.console import say, table

NUM_HELD_OUT = (50, 75, 100, 125, 150, 200, 300, 1000)
AREAS = (0.5, 0.55, 0.6, 0.65)
_CORRELATION = 0.9  # of two attacks' errors on an image: they nearly agree on how hard it is
_NUM_SAMPLES = 2000
_CERTAIN = Attack("made", Estimate(1.0, 1.0, 1.0), Estimate(1.0, 1.0, 1.0))


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--repeats", type=int, default=200, help="simulated audits of each row; default: 200"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num, area in product(NUM_HELD_OUT, AREAS):
        counts = Counter(simulated_verdict(num, area, seed) for seed in range(arguments.repeats))
        shares = [counts[name] / arguments.repeats for name in ("pass", "inconclusive", "fail")]
        rows.append((num, area, *shares))
        say(f"{num} held out, AUC {area}: " + ", ".join(f"{share:.2f}" for share in shares))
    head = ("held out", "AUC", "pass", "inconclusive", "fail")
    with arguments.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
    say(table(rows, head))
    return 0


def simulated_verdict(num_holdout: int, area: float, seed: int) -> str:
    """Return the verdict on an expert whose members the attacks' sum recognises with a given area.

    Args:
        num_holdout: units held out, and as many members.
        area: under the ROC curve of the sum, of infinitely many units.
        seed: of the scores.
    """
    random = torch.Generator().manual_seed(seed)
    difficulty_SI = torch.randn(2, num_holdout, 1, generator=random)
    score_SIA = _scores(num_holdout, area, random)
    expert = _of_logs(difficulty_SI - score_SIA)
    shadow = _of_logs(difficulty_SI.expand_as(score_SIA))
    membership = measure_membership(expert, reference=shadow, shadows=[shadow])
    limits = Audit(required=True, min_holdout_units=1, max_near_copy_rate=0.01, max_mia_auc=0.6)
    low, high = wilson(0, _NUM_SAMPLES)
    findings = MeasuredLeaks(
        num_holdout=num_holdout,
        membership=membership,
        control=Membership((_CERTAIN,), (), num_holdout, num_holdout, torch.zeros(0)),
        sides_alike=True,
        copies={"pixels": Estimate(0.0, low, high)},
        control_copies={"pixels": 1.0},
    )
    verdict, _ = judge(findings, limits)
    return verdict


def _scores(num_units: int, area: float, random: torch.Generator) -> torch.Tensor:
    """Return how much smaller the expert's log errors are than a shadow's, of members and of others."""
    num_attacks = len(names())
    common_SI1 = torch.randn(2, num_units, 1, generator=random)
    own_SIA = torch.randn(2, num_units, num_attacks, generator=random)
    score_SIA = sqrt(_CORRELATION) * common_SI1 + sqrt(1 - _CORRELATION) * own_SIA
    # The sum counts the losses alone, here all of one size.
    num_losses = sum(name.startswith("loss ") for name in names())
    deviation = sqrt(_CORRELATION + (1 - _CORRELATION) / num_losses)
    # Of two normal scores the area is Phi(shift / (sqrt(2) deviation)).
    score_SIA[0] += sqrt(2) * deviation * NormalDist().inv_cdf(area)
    return score_SIA


def _of_logs(log_error_SIA: torch.Tensor) -> UnitScores:
    member_IA, other_IA = -log_error_SIA.exp()
    unit_I = torch.arange(len(member_IA))
    return UnitScores(member_IA, other_IA, unit_I, unit_I)


if __name__ == "__main__":
    sys.exit(main())
