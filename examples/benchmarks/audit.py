"""What the leak audit costs beside the training that it follows: seconds of this process, for one small expert.

    python examples/benchmarks/audit.py --steps 4000

Training, reference, shadows, overfitted copy, attacks and samples run one after the other on one thread, with the
numbers that `ddm.audit.effort` gives a site of as many units.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from support.plan import small_plan

from ddm.audit.attacks import AttackedExpert
from ddm.audit.effort import NUM_SHADOWS, effort_of
from ddm.audit.running import draw_samples, score_images
from ddm.diffusion.path import path_named
from ddm.models import build_expert
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective

HELD = 300
MEMBERS = 300


def main() -> None:
    """Print a line for each part, and the share of the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument(
        "--side", type=int, default=8, help="side of the made-up grey images, in pixels"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = small_plan((1, arguments.side, arguments.side), arguments.steps)
    device = torch.device(arguments.device)
    images = torch.from_numpy(
        np.random.default_rng(0).standard_normal((3000, *plan.expert_shape), dtype=np.float32)
    )
    effort = effort_of(plan.expert.training, HELD + MEMBERS, 10_000, trains_reference=True)
    path = path_named(plan.objective.path)
    seconds = {}

    def trained(name: str, num_steps: int, learned: torch.Tensor) -> torch.nn.Module:
        recipe = plan.expert.training.model_copy(update={"num_steps": num_steps})
        network = build_expert(plan.expert.architecture, plan.expert_shape, seed=0)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            train(
                network,
                Examples(learned),
                recipe,
                TrainingObjective(path, plan.t_distribution),
                TrainingRun(Path(folder), engine=Engine(device=arguments.device)),
            )
        seconds[name] = time.monotonic() - started
        return network.eval().requires_grad_(False).to(device)

    experts = [
        trained("training", arguments.steps, images[HELD:]),
        trained("reference", effort.reference_steps, images[HELD + MEMBERS :]),
        # From which weights a training starts does not change what it costs.
        *(
            trained(f"shadow {number}", effort.shadow_steps, images[HELD + MEMBERS :])
            for number in range(NUM_SHADOWS)
        ),
        trained(
            "overfitted copy", effort.control_steps, images[HELD : HELD + effort.control_units]
        ),
    ]
    started = time.monotonic()
    for expert in experts:
        target = AttackedExpert(expert, path, "velocity", device)
        rows = torch.arange(HELD + MEMBERS).repeat_interleave(effort.images_per_unit)
        score_images(target, images, rows, None, 0, lambda num: None)
    seconds["attacks"], started = time.monotonic() - started, time.monotonic()
    target = AttackedExpert(experts[0], path, "velocity", device)
    for _ in draw_samples(
        target, path, plan.expert_shape, None, effort.num_samples, 0, lambda num: None
    ):
        pass
    seconds["samples"] = time.monotonic() - started
    whole = seconds.pop("training")
    print(effort)
    print(
        f"{'training':16} {whole:8.1f} s, {arguments.steps} steps of {plan.expert.training.batch_size} images"
    )
    for name, part_seconds in seconds.items():
        print(f"{name:16} {part_seconds:8.1f} s")
    print(
        f"{'audit':16} {sum(seconds.values()):8.1f} s, {sum(seconds.values()) / whole:.1%} of the training"
    )


if __name__ == "__main__":
    main()
