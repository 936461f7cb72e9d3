"""What each of two processes runs that torchrun starts: one training after another, by what a file tells."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from ddm.engine import Engine
from tests.ddm.test_training import Run, settings


def main(folder: Path) -> None:
    """Train each of the runs in `runs.json`, whose checkpoints lie in folders of their names; the first writes."""
    torch.set_num_threads(1)
    for name, asked in json.loads((folder / "runs.json").read_text("utf-8")).items():
        run = Run(folder / name, settings(**asked["recipe"]), engine=Engine.model_validate(asked["engine"]))
        try:
            # Only the first process is told, and all of them stop.
            ema = run(lambda run=run, stop=asked["stop"]: bool(run.told) and run.told[-1].step == stop).ema
        except KeyboardInterrupt:
            continue
        if torch.distributed.get_rank() == 0:
            save_file(ema, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps([(told.step, told.loss) for told in run.told]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
