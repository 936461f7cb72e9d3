"""The command `ddm sample-student`: draw images from a distilled student, by the record beside it."""

from pathlib import Path
from typing import Annotated

import typer

from ddm.cli.options import (
    ImagesOption,
    Machine,
    NumOption,
    Solving,
    Told,
    grouped,
    picture_bytes,
    read_memory,
)
from ddm.cli.settings import SampleStudentSettings, read_settings, set_option
from ddm.system.console import progress, say


@grouped
def sample_student(
    student: Annotated[
        Path, typer.Argument(metavar="FILE", help="FILE.safetensors, as ddm distill wrote it.")
    ],
    *,
    num: NumOption,
    out: ImagesOption,
    told: Told,
    solving: Solving,
    settings: Annotated[list[str] | None, set_option(SampleStudentSettings)] = None,
    machine: Machine,
) -> None:
    """Sample images from a student; nobody signed it, its record says what it was made of."""
    from ddm.io.pictures import prepare_output

    rare = read_settings(SampleStudentSettings, settings)
    prepare_output(out)

    import torch

    from ddm.cli.drawing import Computing, Job, StudentSource, draw
    from ddm.distillation.student import read_record
    from ddm.footprint import condition_bytes
    from ddm.io.pictures import write_samples
    from ddm.sampling.guidance import class_names
    from ddm.sampling.strategies import Lock
    from ddm.system.memory import memory_limit

    computing = Computing(machine.device, machine.arithmetic(), rare.batch)
    processes, record = min(machine.processes, num), read_record(student)
    prepare_output(out, record.data.shape)
    needed = record.sampling_bytes(num=-(-num // processes), batch=rare.batch, steps=solving.steps)
    beside = picture_bytes(out, num, record.data.shape) + (
        condition_bytes(record.condition) if told.text else 0
    )
    limit = memory_limit(read_memory(machine.memory)).part(processes)
    limit.check("memory", needed + -(-beside // processes))
    condition = told.value(record.condition)
    how = {
        "steps": solving.steps,
        "solver": solving.solver.value,
        "condition": condition,
        "condition_prior": None,
        "guidance": told.guidance or 0.0,
    }
    job = Job(StudentSource(record, student, computing), Lock(), solving.seed, how)
    with progress(f"sampling {num}") as advance:
        drawn = draw(job, num, processes, torch.ones(1), advance)
    classes = class_names(record.condition, condition, num)
    source, owners = record.source, drawn.expert_N.tolist()
    written = write_samples(drawn.images, owners, out, source.manifest, classes, record.data.range)
    say(
        f"{num} samples in {out} ({written}). The student names as its source {source.plan_id}, version "
        f"{source.version}, manifest {source.manifest}; nobody signed that."
    )
