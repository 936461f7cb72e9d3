"""The command `ddm sample-student`: draw images from a distilled student, by the record beside it."""

from math import ceil
from pathlib import Path
from typing import Annotated

import typer

from ddm.cli.options import (
    ConditionOptions,
    FirstOption,
    ImagesOption,
    MachineOptions,
    NumOption,
    SolverOptions,
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
    first: FirstOption = 0,
    out: ImagesOption,
    conditioning: ConditionOptions,
    solving: SolverOptions,
    settings: Annotated[list[str] | None, set_option(SampleStudentSettings)] = None,
    machine: MachineOptions,
) -> None:
    """Sample images from a student; nobody signed it, its record says what it was made of."""
    from ddm.io.pictures import prepare_output

    rare = read_settings(SampleStudentSettings, settings)
    # A folder that cannot be written is refused before the student is read.
    prepare_output(out)

    import torch

    from ddm.cli.sampling import ComputeSettings, SamplingJob, StudentSource, draw
    from ddm.distillation.student import read_record
    from ddm.footprint import condition_bytes
    from ddm.io.pictures import write_samples
    from ddm.sampling.guidance import class_names
    from ddm.sampling.strategies import Lock
    from ddm.system.memory import memory_limit

    computing = ComputeSettings(machine.device, machine.arithmetic(), rare.batch)
    # A process without a sample would load the student for nothing.
    num_processes = min(machine.processes, num)
    record = read_record(student)
    prepare_output(out, record.data.shape)

    process_bytes = record.sampling_bytes(
        num=ceil(num / num_processes), batch=rare.batch, steps=solving.steps
    )
    shared_bytes = picture_bytes(out, num, record.data.shape)
    if conditioning.text:
        shared_bytes += condition_bytes(record.condition)
    # A student cannot be loaded in parts, unlike an ensemble.
    limit = memory_limit(read_memory(machine.memory)).part(num_processes)
    limit.check("memory", process_bytes + ceil(shared_bytes / num_processes))

    condition = conditioning.value(record.condition)
    how = {
        "steps": solving.steps,
        "solver": solving.solver.value,
        "condition": condition,
        # Of one network there are no shares to weigh.
        "condition_prior": None,
        "guidance": conditioning.guidance or 0.0,
    }
    # An ensemble of one, so that everything else is as with a release.
    source = StudentSource(record, student, computing)
    job = SamplingJob(source, Lock(), solving.seed, how, first_number=first)
    with progress(f"sampling {num}") as advance:
        drawn = draw(job, num, num_processes, torch.ones(1), advance)

    origin = record.source
    written = write_samples(
        drawn.images,
        # An evaluation would take the student for the first expert of its release.
        None,
        out,
        origin.manifest,
        class_names(record.condition, condition, num),
        record.data.range,
        first_number=first,
    )
    say(
        f"{num} samples in {out} ({written}). The student names as its source {origin.plan_id}, version "
        f"{origin.version}, manifest {origin.manifest}; nobody signed that."
    )
