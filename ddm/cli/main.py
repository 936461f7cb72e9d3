"""The program `ddm`: a researcher's commands on releases, and one owner's: split, train and assemble."""

import json
from typing import Annotated

import typer

from ddm.cli.assemble import assemble
from ddm.cli.audits import audit_lines, audits_as_json
from ddm.cli.distill import distill
from ddm.cli.evaluate import evaluate
from ddm.cli.export import export
from ddm.cli.fetch import fetch
from ddm.cli.log import log
from ddm.cli.options import (
    CheckpointOption,
    ReleaseArgument,
    Verification,
    grouped,
    pins,
    warn_if_expired,
)
from ddm.cli.push import push
from ddm.cli.sample import sample
from ddm.cli.sample_student import sample_student
from ddm.cli.serve import serve
from ddm.cli.split import split
from ddm.cli.train import train
from ddm.cli.witnesses import QuorumOption, WitnessOption, read_witnesses
from ddm.fetching.address import read_address
from ddm.io.modes import keep_writing_private
from ddm.loading.release import Release
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.protocol.calibration import calibration_bands, calibration_rows
from ddm.protocol.growth import describe_standing, stated_bases
from ddm.protocol.plan import REHEARSAL, Plan
from ddm.system.console import (
    ResumableCommand,
    human_bytes,
    human_flops,
    new_program,
    run_app,
    say,
    table,
)
from ddm.system.secrecy import forbid_core_dumps
from ddm.trust.comparison import CodeSubject, comparison_code

app = new_program(
    "Verify a published ensemble of diffusion experts and sample from it, or make one of your own data."
)


@app.command()
@grouped
def verify(
    release: ReleaseArgument,
    *,
    verification: Verification,
    checkpoint: CheckpointOption = None,
    witness: WitnessOption = None,
    quorum: QuorumOption = None,
) -> None:
    """Check every signature, digest, role and version, and the log's proofs; exit 0 only if all of them hold."""
    witnesses = read_witnesses(witness, quorum)
    opened = verification.open(release, checkpoints=checkpoint or (), witnesses=witnesses)
    pinned = pins(verification.silo_key)
    verified = opened.verified
    manifest = opened.manifest
    # What was hashed and signed, for a person who compares it with the folder's size.
    total = sum(file.bytes for file in verified.files.values())
    say(f"Verified {release}: ensemble {manifest.plan_id}, version {manifest.version}.")
    _say_rehearsal(opened)
    say(f"  root       {verified.root_fingerprint}")
    say(f"  root code  {comparison_code(verified.root_fingerprint, CodeSubject.ROOT)}")
    say(
        f"  files      {len(verified.files)} signed files, {total} bytes; none missing, none unlisted"
    )
    say(f"  timestamp  valid until {verified.expires.isoformat()}")
    log = opened.log.view.signed
    say(
        f"  log        entry of {log.checkpoint.origin}, which has {log.size} entries, root hash {log.root.hex()}"
    )
    # `open` has compared them, and refuses a release whose log has another history.
    for path in checkpoint or []:
        say(f"  checkpoint {path} is of the same history")
    if witnesses:
        say(
            f"  witnesses  {witnesses.num_required} of {len(witnesses.distinct_keys)} or more cosigned this checkpoint"
        )
    for silo_id, fingerprint in sorted(verified.silo_keys.items()):
        # A key that the reader pinned was compared by another way; for any other the word of the holders of targets
        # stands.
        key_origin = "that targets enrolled for this silo"
        if silo_id in pinned:
            key_origin = "you pinned"
        say(f"  silo {silo_id:<9} signed by the key {key_origin}: {fingerprint}")
    _say_lowered(opened)
    _say_audits(opened)
    warn_if_expired(opened)


@app.command()
@grouped
def info(
    release: ReleaseArgument,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    verification: Verification,
) -> None:
    """Show what a release holds: silos, experts, privacy, router; verifies first."""
    # The documents say everything: of a release on a host no expert is fetched.
    is_on_host = read_address(release) is not None
    opened = verification.open(release, experts_later=is_on_host)
    # The manifest as it is, so that scripts have every field that documents.md lists.
    if as_json:
        whole = opened.manifest.model_dump(mode="json") | {"audits": audits_as_json(opened)}
        say(json.dumps(whole, indent=2))
        # Last, since it raises: scripts get the JSON as well as the exit code.
        warn_if_expired(opened)
        return
    manifest = opened.manifest
    plan = opened.plan
    shape = " x ".join(str(side) for side in plan.data.shape)
    say(
        f"Ensemble {manifest.plan_id}, version {manifest.version}, published {manifest.published_at.isoformat()}"
    )
    _say_rehearsal(opened)
    say(
        f"  images {shape}, {len(manifest.experts)} experts of kind {plan.expert.architecture.kind}"
    )
    if plan.transform:
        say(f"  each picture at a silo: {'; '.join(plan.transform.words)}")
    if isinstance(plan.condition, TextCondition) and plan.condition.encoder:
        say(f"  condition: a text, through your copy of the encoder {plan.condition.encoder.name}")
    if isinstance(plan.condition, ClassCondition):
        say(
            f"  condition: one of {plan.condition.num_classes} classes, {plan.condition.classes.words(64)}"
        )
    say(_describe_network(plan))
    for stated in stated_bases(plan, opened.earlier_plans, opened.submissions.keys()):
        say(f"  training of {stated.experts} started from {stated.base.words}")
        for change in stated.base.changes:
            say(f"    {change}")
    say(f"  router {manifest.router.kind}, licence {manifest.licence}\n")
    say(_silo_table(opened))
    _say_standings(opened)
    _say_lowered(opened)
    _say_audits(opened)
    _say_calibration(opened)
    if manifest.private_experts:
        # What a silo spent is one sum over statistics and private training (`Plan.spends`).
        covered = "a silo's epsilon covers these and the router's inputs, together"
    elif plan.statistics.private:
        covered = "epsilon covers the router's inputs only"
    else:
        covered = "one owner had all of the data"
    say(f"\n{manifest.weights_in_words}; {covered}.")
    for expert in manifest.private_experts:
        say(f"  expert {expert.expert_id}: {expert.privacy}, replace-one")
    warn_if_expired(opened)


def _say_rehearsal(opened: Release) -> None:
    if opened.plan.rehearsal:
        say(f"  {REHEARSAL}")


def _silo_table(opened: Release) -> str:
    """List the silos, or the islands of one owner, with their shares and privacy."""
    manifest = opened.manifest
    statistics = opened.plan.statistics
    priors = manifest.silo_priors()
    rows = []
    for silo in manifest.silos:
        submission = opened.submissions[silo.silo_id]
        rows.append(
            (
                silo.silo_id,
                f"{submission.num_units}",
                f"{len(submission.experts)}",
                f"{priors[silo.silo_id]:.3f}",
                # An island has neither: nothing was hidden of it.
                "none" if silo.epsilon is None else f"{silo.epsilon:g}",
                "none" if silo.delta is None else f"{silo.delta:g}",
                silo.audit,
                silo.isolation,
            )
        )
    header = (
        "silo" if statistics.private else "island",
        f"{statistics.unit}s",
        "experts",
        "prior",
        "epsilon",
        "delta",
        "audit",
        "isolation",
    )
    return table(rows, header)


def _describe_network(plan: Plan) -> str:
    """Return the size of an expert's network, and what it takes to evaluate and to train."""
    from ddm.footprint import expert_size, training_bytes
    from ddm.models import count_flops

    size = expert_size(plan)
    batch = plan.expert.training.batch_size
    forward, both = count_flops(plan.expert.architecture, plan.expert_shape, plan.condition)
    memory = human_bytes(size.bytes + size.forward_bytes(1))
    return (
        f"  an expert: {size.parameters:,} parameters, {human_flops(forward)} and {memory} to evaluate one image,"
        f"\n  {human_flops(both)} to train on one, {human_bytes(training_bytes(plan))} in batches of {batch} (float32)"
    )


def _say_standings(opened: Release) -> None:
    """Say what each silo is in a plan that carries experts over, and which silos of the plan are not here."""
    for silo in opened.manifest.silos:
        standing = describe_standing(silo, opened.plan)
        if standing:
            say(f"  silo {silo.silo_id} {standing}")
    for reason, absent in (
        ("missing", opened.manifest.missing_silos),
        ("withdrawn", opened.manifest.withdrawn_silos),
    ):
        if absent:
            say(f"  {reason}: {', '.join(absent)}; the priors are shares among the silos above")


def _say_calibration(opened: Release) -> None:
    """Show how far the router's probabilities are off, by noise level, where the manifest states it."""
    manifest = opened.manifest
    if rows := calibration_rows(calibration_bands(manifest.evaluation)):
        heads = (
            f"router {manifest.router.kind}",
            "expected calibration error, 95%",
            "at temperature 1",
        )
        say("\n" + table(rows, heads))


def _say_audits(opened: Release) -> None:
    """Say what each silo's audit found, and who is responsible for experts that leave without a pass."""
    for line in audit_lines(opened):
        say(f"  {line}")


def _say_lowered(opened: Release) -> None:
    """Name the silos whose prior counts less than they stated, with the operator's reason."""
    for silo in opened.manifest.silos:
        if silo.units_reason is not None:
            stated = f"{opened.submissions[silo.silo_id].num_units} {opened.plan.statistics.unit}s"
            say(
                f"  silo {silo.silo_id} counts as {silo.units} of the {stated} that it states: {silo.units_reason}"
            )


app.command("fetch")(fetch)
app.command("push")(push)
app.command("log")(log)
app.command("sample")(sample)
app.command("serve")(serve)
app.command("evaluate")(evaluate)
app.command("distill")(distill)
app.command("sample-student")(sample_student)
app.command("export")(export)
app.command("split")(split)
app.command("train")(train)
app.command("assemble")(assemble)


RESUMABLE = (
    ResumableCommand("fetch", "What was fetched is kept in the cache."),
    ResumableCommand("distill", "Samples and checkpoints are kept beside the student."),
    ResumableCommand("train", "Checkpoints and trained experts are kept."),
)


def main() -> None:
    """Entry point of the `ddm` command."""
    keep_writing_private()
    forbid_core_dumps()
    run_app(app, resumable=RESUMABLE)


if __name__ == "__main__":
    main()
