"""Trains and audits silos of several sizes in several ways, with and without a base; what a hospital should choose.

    python -m examples.paper.leaks --dataset fashion-mnist --data FOLDER --out build/leaks

Everything measured is kept in OUT and not measured again, so an interrupted run goes on where it stopped. The page
shows everything that OUT has with as many samples and shadows, judged by the same classifier. `--published` adds the
rows of an earlier run with the same `--samples`, `--shadows` and `--scale`, which are not measured again either.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

from ddm.io.files import require_file
from ddm.system.console import say
from examples.paper.leaks.cells import LEAKS, LeakCell, read_cells
from examples.paper.leaks.choices import CHOICES, MAX_IMAGES
from examples.paper.leaks.results import write_report
from examples.paper.leaks.site import Data, LeakWorkshop, Silo
from examples.paper.leaks.targets import leak_targets
from examples.paper.tables.clock import ended
from examples.paper.tables.data import read_world
from examples.paper.tables.judging import CLASSIFIER
from examples.paper.tables.results import Figure, Kept, commit, hardware, utc
from examples.paper.tables.targets import write_targets
from silo.audit.document import ExpertAudit

# Those of a silo's images: shoes, shirts and bags; pneumonia among chest X-rays.
PRIVATE_CLASSES = {"fashion-mnist": (5, 6, 7, 8, 9), "cxr": (1,)}
# Those of the public images that the base learns: trousers, sneakers and bags, as in table 11; healthy lungs.
BASE_CLASSES = {"fashion-mnist": (1, 7, 8), "cxr": (0,)}
NUM_IMAGES = (100, 300, 1000, MAX_IMAGES)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dataset", choices=tuple(PRIVATE_CLASSES), required=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="files of the data set, as for examples.paper.run"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--images",
        type=int,
        nargs="+",
        default=NUM_IMAGES,
        help="numbers of images of a silo; default: 100 to 3,000",
    )
    parser.add_argument("--choices", nargs="+", choices=tuple(CHOICES), default=tuple(CHOICES))
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of seeds, of images and training; default: 1"
    )
    parser.add_argument(
        "--samples", type=int, default=2000, help="number of samples for FID; default: 2000"
    )
    parser.add_argument(
        "--shadows",
        type=int,
        default=2,
        help="number of shadows that the outsider trains; default: 2; 0 for no outsider",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of all training steps; default: 1"
    )
    parser.add_argument(
        "--classifier",
        type=Path,
        metavar="FILE",
        help="the classifier.safetensors of results whose FIDs new ones are compared with; default: trained now",
    )
    parser.add_argument(
        "--published",
        type=Path,
        metavar="FOLDER",
        help="folder of an earlier run's results to continue",
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return ended(lambda: run(arguments), arguments.out)


def run(asked: argparse.Namespace) -> None:
    """Measure what was asked for, and write the page after each."""
    world = read_world(asked.dataset, asked.data)
    data = Data.of(world, PRIVATE_CLASSES[asked.dataset], BASE_CLASSES[asked.dataset])
    # experts of other images or steps are others
    work = asked.out / "work" / f"{asked.dataset}-{asked.scale:g}"
    work.mkdir(parents=True, exist_ok=True)
    classifier_file = work / CLASSIFIER
    if asked.classifier is not None:
        classifier_file = require_file(asked.classifier, "the classifier of earlier results")
    workshop = LeakWorkshop(data, world, work, asked.scale, classifier_file)
    judge = workshop.classifier_digest
    published: list[LeakCell] = []
    if asked.published is not None:
        published = read_cells(asked.published / LEAKS, asked.dataset, judge, asked.scale)
    base = workshop.base
    of_base = workshop.judge(workshop.base_expert, base.folder / base.file.path, asked.samples)
    kept = Kept(work / f"cells-{asked.samples}-{asked.shadows}-{judge[:16]}")

    def known() -> dict[tuple[str, int, int], LeakCell]:
        """Return all experts that were measured by now, by this process or another."""
        return {cell.key: cell for cell in [*published, *kept.all(LeakCell)]}

    nums = sorted({min(num, len(data.learned), MAX_IMAGES) for num in asked.images})
    for seed, num, choice in product(range(asked.seeds), nums, asked.choices):
        key = (choice, num, seed)
        if key not in known():
            silo = Silo(workshop, CHOICES[choice], num, seed)
            cell = measured(silo, choice, asked.samples, asked.shadows, judge)
            kept.write(key, cell)
            say(
                f"{num} images, {CHOICES[choice].label}, seed {seed}: {cell.verdict}, "
                f"AUC {cell.figures['auc'].value:.3f}, FID {cell.figures['fid'].value:.1f}, "
                f"{cell.training_s:.0f} s and {cell.audit_s:.0f} s of audit"
            )
        cells = list(known().values())
        write_report(asked.out, asked.dataset, cells, of_base, asked.scale)
        write_targets(asked.out / "targets.csv", leak_targets(cells))
    say(f"Written: {asked.out / 'README.md'}")


def measured(
    silo: Silo, choice: str, num_samples: int, num_shadows: int, classifier: str
) -> LeakCell:
    """Train, audit and judge one expert."""
    training_s = silo.train()
    audit, audit_s = silo.audit()
    paid = silo.expert.paid
    figures = _strongest(audit)
    for name, estimate in silo.judge(num_samples).items():
        figures[name] = Figure.of(estimate)
    successes = silo.attack(num_shadows)
    if successes:
        # The attacker's best figures, chosen afterwards: if anything, too high.
        best_auc = max(success.auc for success in successes)
        best_tpr = max(success.tpr for success in successes)
        figures["outsider_auc"] = Figure(value=best_auc, low=None, high=None)
        figures["outsider_tpr"] = Figure(value=best_tpr, low=None, high=None)
    return LeakCell(
        choice=choice,
        images=silo.num,
        seed=silo.seed,
        steps=silo.expert.plan.expert.training.num_steps,
        verdict=audit.verdict,
        figures=figures,
        noise_multiplier=paid.noise_multiplier if paid else None,
        training_s=training_s,
        audit_s=audit_s,
        classifier=classifier,
        commit=commit(),
        hardware=hardware(torch.device("cpu")),
        utc=utc(),
    )


def _strongest(audit: ExpertAudit) -> dict[str, Figure]:
    named = {"auc": audit.deciding_auc, "tpr": audit.deciding_tpr, "copies": audit.copies}
    worst = {name: max(figures, key=lambda each: each.value) for name, figures in named.items()}
    return {
        name: Figure(value=figure.value, low=figure.low, high=figure.high)
        for name, figure in worst.items()
    }


if __name__ == "__main__":
    sys.exit(main())
