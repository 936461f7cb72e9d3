"""The command `ddm sample-student`: draw images from a distilled student, by the record beside it."""

from pathlib import Path
from typing import Annotated

import typer

from ddm.cli.options import (
    ClassOption,
    DeviceOption,
    GuidanceOption,
    ImagesOption,
    MemoryOption,
    NumOption,
    SeedOption,
    SolverName,
    SolverOption,
    StepsOption,
    TextEncoderOption,
    TextOption,
    picture_bytes,
    read_memory,
)
from ddm.cli.sample import check_text
from ddm.cli.settings import SampleStudentSettings, read_settings, set_option
from ddm.errors import SetupError
from ddm.system.console import progress, say


def sample_student(
    student: Annotated[Path, typer.Argument(metavar="FILE", help="FILE.safetensors, as ddm distill wrote it.")],
    *,
    num: NumOption,
    out: ImagesOption,
    label: ClassOption = None,
    text: TextOption = None,
    text_encoder: TextEncoderOption = None,
    guidance: GuidanceOption = None,
    steps: StepsOption = 25,
    solver: SolverOption = SolverName.MIDPOINT,
    seed: SeedOption = 0,
    settings: Annotated[list[str] | None, set_option(SampleStudentSettings)] = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
) -> None:
    """Sample images from a student; nobody signed it, its record says what it was made of."""
    from ddm.io.pictures import prepare

    rare = read_settings(SampleStudentSettings, settings)
    check_text(label, text, text_encoder)
    memory_bytes = read_memory(memory)
    if guidance and label is None and text is None:
        raise SetupError("--guidance", expected="--class or --text as well", got=f"{guidance} without a condition")
    prepare(out)

    from dataclasses import replace

    from ddm.cli.conditions import encoded
    from ddm.distillation.student import Student, load_student
    from ddm.protocol.footprint import condition_bytes
    from ddm.system.devices import device_named
    from ddm.system.memory import memory_limit

    limit = memory_limit(memory_bytes)

    def check(record: Student) -> None:
        needed = record.sampling_bytes(num=num, batch=rare.batch, steps=steps)
        needed += picture_bytes(out, num, record.data.shape)
        limit.check("memory", needed + (condition_bytes(record.condition) if text is not None else 0))

    record, alone = load_student(student, device=device_named(device, setting="--device"), check=check)
    condition = label if text is None or text_encoder is None else encoded(text, text_encoder, record.condition)
    with progress(f"sampling {num}") as advance:
        drawn = replace(alone, chunk_size=rare.batch).sample(
            num,
            steps=steps,
            solver=solver.value,
            seed=seed,
            condition=condition,
            guidance=guidance or 0.0,
            on_progress=advance,
        )
    written = drawn.save(out)
    source = record.source
    say(
        f"{num} samples in {out} ({written}). The student names as its source {source.plan_id}, version "
        f"{source.version}, manifest {source.manifest}; nobody signed that."
    )
