"""The command `ddm sample-student`: images from a distilled student and the record beside it."""

from pathlib import Path
from typing import Annotated

import typer

from ddm.cli.options import DeviceOption
from ddm.cli.sample import EncoderFolder, SolverName, Text, check_text
from ddm.errors import SetupError
from ddm.system.console import progress, say


def sample_student(
    student: Annotated[Path, typer.Argument(metavar="FILE", help="FILE.safetensors, as ddm distill wrote it.")],
    num: Annotated[int, typer.Option(min=1, help="How many images.")],
    out: Annotated[Path, typer.Option(help="FILE.png (grid), FILE.npz (float32) or a folder of PNG files.")],
    label: Annotated[int | None, typer.Option("--class", min=0, help="The class of all images.")] = None,
    text: Text = None,
    text_encoder: EncoderFolder = None,
    guidance: Annotated[float, typer.Option(min=0.0, max=1000.0, help="g, with --class or --text.")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Solver steps.")] = 50,
    solver: Annotated[SolverName, typer.Option(help="ODE solver.")] = SolverName.HEUN,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same images.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Most images at once.")] = 64,
    device: DeviceOption = "auto",
) -> None:
    """Sample images from a student; nobody signed it, its record says what it was made of."""
    from ddm.io.pictures import prepare, write_samples

    check_text(label, text, text_encoder)
    if guidance and label is None and text is None:
        raise SetupError("--guidance", expected="a --class or --text with it", got="none")
    prepare(out)

    from dataclasses import replace

    from ddm.cli.conditions import encoded
    from ddm.distillation.student import load_student
    from ddm.system.devices import device_named

    record, alone = load_student(student, device=device_named(device, setting="--device"))
    asked = label if text is None or text_encoder is None else encoded(text, text_encoder, record.condition)
    with progress(f"sampling {num}") as tell:
        drawn = replace(alone, chunk_size=batch).sample(
            num,
            steps=steps,
            solver=solver.value,
            seed=seed,
            condition=asked,
            guidance=guidance,
            on_progress=tell,
        )
    written = write_samples(drawn.images, drawn.expert_N.tolist(), out)
    source = record.source
    say(
        f"{num} samples in {out} ({written}). The student names as its source {source.plan_id}, version "
        f"{source.version}, manifest {source.manifest}; nobody signed that."
    )
