"""What each of two processes that train together runs: one training after another, by what a file tells."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ddm.models import build_expert
from ddm.protocol.architecture import Mmdit, TextCondition
from ddm.training.config import Engine
from ddm.training.group import enter_group_environment, join_group, member_of
from tests.ddm.training.test_loop import SHAPE, SMALL, Run, settings

REPOSITORY = Path(__file__).resolve().parents[2]
JOINT = Mmdit(patch=2, hidden=16, depth=2, heads=2, shared_depth=1)
TEXT = TextCondition(dim=3, max_tokens=2)


def run_group(folder: Path) -> None:
    """Run two such processes to their end."""
    processes = []
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "tests.support.group_program", str(folder)]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | environment | {"PYTHONFAULTHANDLER": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_network(kind: str) -> nn.Module:
    """A network of either kind that several processes train."""
    if kind == "mmdit":
        return build_expert(JOINT, SHAPE, condition=TEXT, seed=3)
    return build_expert(SMALL, SHAPE, seed=3)


def make_texts(kind: str, num: int = 40) -> Tensor | None:
    """What that network is told about each image."""
    if kind != "mmdit":
        return None
    return torch.rand(num, TEXT.max_tokens, TEXT.dim, generator=torch.Generator().manual_seed(1))


def main(folder: Path) -> None:
    """Train each of the runs in `runs.json`, whose checkpoints lie in folders of their own; the first writes."""
    torch.set_num_threads(1)
    member = member_of(os.environ)
    enter_group_environment(member)
    join_group(member, folder / "group")
    for name, options in json.loads((folder / "runs.json").read_text("utf-8")).items():
        kind = options["kind"]
        place = folder / (options["folder"] or name)
        run = Run(
            place, settings(**options["recipe"]), model=make_network(kind), labels=make_texts(kind)
        )
        run.engine = Engine.model_validate(options["engine"])
        try:
            # Only the first process is told, and all of them stop.
            ema = run(
                lambda run=run, stop=options["stop"]: (
                    bool(run.reports) and run.reports[-1].step == stop
                )
            ).ema
        except KeyboardInterrupt:
            continue
        if ema:
            save_file(ema, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(
                json.dumps([(progress.step, progress.loss) for progress in run.reports])
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # a thread of torch's that outlives the interpreter may abort; the files are written and closed
    os._exit(0)
