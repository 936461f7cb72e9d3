"""An attacker who shares no code with the audit must not find more in an expert than its audit allows for."""

from pathlib import Path

import pytest
import torch

from examples.paper.leaks.outsider import attack_as_outsider
from tests.support.audited_experts import (
    AuditedDigits,
    audit_digits,
    digits,
    train_expert,
    training_settings,
)

NUM_HELD = 400
NUM_LEARNED = 400
NUM_SHADOWS = 2
# What an attack of somebody else may find beyond the upper end of the audit's interval.
MARGIN = 0.03


def outsiders_auc(audited: AuditedDigits, num_steps: int, folder: Path) -> float:
    """Return the AUC of the outsider's best attack, with shadows trained on digits that the site does not have."""
    images = digits()
    other_images = images[NUM_HELD + NUM_LEARNED :]
    shadows = []
    for number in range(NUM_SHADOWS):
        random = torch.Generator().manual_seed(number)
        row_N = torch.randperm(len(other_images), generator=random)[:NUM_LEARNED]
        recipe = training_settings(num_steps, seed=number + 1)
        shadows.append(train_expert(other_images[row_N], recipe, folder / f"{number}"))
    num_members = NUM_LEARNED // 2
    members = images[NUM_HELD : NUM_HELD + num_members]
    successes = attack_as_outsider(audited.expert, shadows, members, images[:NUM_HELD])
    return max(success.auc for success in successes)


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "verdicts"), [(1500, ("fail",)), (300, ("pass",))])
def test_outsider_with_shadows_finds_no_more_than_the_audit_allows_for(
    num_steps: int, verdicts: tuple[str, ...], tmp_path: Path
) -> None:
    images = digits()
    learned = images[NUM_HELD : NUM_HELD + NUM_LEARNED]
    audited = audit_digits(learned, images[:NUM_HELD], num_steps, tmp_path / "audit")
    assert audited.verdict in verdicts, audited.reason
    auc = outsiders_auc(audited, num_steps, tmp_path / "shadows")
    assert auc <= audited.findings.membership.worst.auc.high + MARGIN
    if audited.verdict == "fail":
        # The attack works: a test in which it found nothing would say nothing about the audit.
        assert auc > 0.6
