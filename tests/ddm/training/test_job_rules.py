"""A job's rules: when a start goes on, who a process is, which command may start it, which result is believed."""

import json
import os
import re
import subprocess
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from ddm.errors import (
    ArchipelagoError,
    DigestError,
    DocumentError,
    NumericalError,
    SetupError,
    TensorFileError,
)
from ddm.images.fit import as_floats
from ddm.images.npz import open_npy
from ddm.images.rows import (
    FileArray,
    Images,
    JoinedArrays,
    ScaledImages,
    SelectedImages,
    StoredImages,
)
from ddm.io.settings import load_settings
from ddm.protocol.base import File
from ddm.training.config import TrainingSettings, filled
from ddm.training.group import Member, member_of
from ddm.training.inputs import open_input, write_inputs
from ddm.training.job import (
    Heartbeat,
    JobFolder,
    Launch,
    ProcessFailure,
    TrainingResult,
    read_document,
    write_document,
    write_transient,
)
from ddm.training.jobs import write_job
from ddm.training.launch import (
    STILL_S,
    CommandCondition,
    LaunchCommand,
    StartFollower,
    StartStatus,
    cause,
    judge,
)
from ddm.training.process import train_folder
from silo.config import SiloSettings
from silo.worker.jobs import discard_others
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.jobs import SmallJob, small_task
from tests.support.waiting import wait_until

SETTINGS = TrainingSettings(silence_s=100.0, start_s=1000.0)
BY_COMMAND = TrainingSettings(launcher=("true", "{folder}"), silence_s=10.0)


def test_start_goes_on_until_it_surely_ended_or_was_lost() -> None:
    def verdict(
        condition: CommandCondition, alive: bool, ended: bool, silent_s: float, ours: bool = False
    ) -> str:
        return judge(StartStatus(condition, alive, ended, silent_s, ours), SETTINGS)

    for situation, expected in [
        (("running", False, False, 1e9), "wait"),  # in srun's queue
        (("well", False, False, 999.0), "wait"),  # in sbatch's
        (("well", False, False, 1000.0), "lost"),
        (("badly", False, False, 0.0), "ended"),  # the command itself failed
        # the connection failed, perhaps, and the job goes on
        (
            ("badly", True, False, STILL_S - 1),
            "wait",
        ),
        (("badly", True, False, STILL_S), "ended"),
        (("running", True, False, 99.0), "wait"),
        (("running", True, False, 100.0), "lost"),
        (("running", True, True, 1.0), "wait"),  # a scheduler may start it again
        (("running", True, True, STILL_S), "ended"),
        (("well", True, True, 0.0), "ended"),
        (("well", True, False, 99.0), "wait"),  # sbatch has returned long ago
        (("unknown", True, False, 99.0), "wait"),  # whoever started it is dead, it may live
        (("unknown", False, False, 99.0), "wait"),
        (("unknown", False, False, 100.0), "lost"),
    ]:
        assert verdict(*situation) == expected, situation
    for situation, expected in [
        (("running", True, True, 1.0), "wait"),  # the others still write
        (("running", True, False, 100.0), "lost"),
        (("running", False, False, 1e9), "wait"),  # importing on a slow disk
        (("well", True, True, 0.0), "ended"),
        (("badly", True, False, 0.0), "ended"),
    ]:
        assert verdict(*situation, ours=True) == expected, situation


def test_error_behind_all_others_is_raised() -> None:
    gone = ProcessFailure(
        rank=0, num_processes=2, kind="other", subject="connection closed by peer"
    )
    broken = ProcessFailure(
        rank=1,
        num_processes=2,
        kind="ours",
        code=NumericalError.exit_code,
        subject="loss",
        got="nan",
        remedy="Slower.",
    )
    full = ProcessFailure(
        rank=1, num_processes=2, kind="system", code=28, subject="No space left on device"
    )
    died = ProcessFailure(rank=1, num_processes=2, kind="died", subject="SIGKILL")
    assert cause([], is_retried=False) is None
    for failures, kind, words in [
        (
            [gone, died],
            SetupError,
            "training process 2 of 2: expected its answer, got its end: SIGKILL",
        ),
        ([gone, broken], NumericalError, "loss: got nan"),
        ([full], OSError, "No space left"),
        ([gone], RuntimeError, "training process 1 of 2:\nconnection closed by peer"),
    ]:
        error = cause(failures, is_retried=False)
        assert type(error) is kind and words in str(error), error
    assert cause([gone, died], is_retried=True) is None, "another start answers that"
    assert isinstance(cause([died, broken], is_retried=True), NumericalError)


def test_process_knows_who_it_is_from_whoever_started_it() -> None:
    by_number = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }
    step = slurm | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    for environment, expected in [
        ({}, Member(0, 1, 0, True)),
        (by_number, Member(3, 4, 1, False, "--")),
        (by_number | {"LOCAL_WORLD_SIZE": "4"}, Member(3, 4, 1, True, "--")),
        (step, Member(1, 2, 0, False, "7-0-")),
        (
            step | {"SLURM_STEP_NUM_NODES": "1", "SLURM_RESTART_COUNT": "2"},
            Member(1, 2, 0, True, "7-0-2"),
        ),
        (slurm, Member(0, 1, 0, True)),  # a batch script, which is one process whatever the job has
        (mpi, Member(1, 2, 1, False, "--")),
        (by_number | slurm, Member(3, 4, 1, False, "7-0-")),
    ]:
        assert member_of(environment) == expected, environment
    for wrong in (
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
    ):
        with pytest.raises(SetupError, check=has_subject("RANK and WORLD_SIZE")):
            member_of(wrong)


def test_launcher_is_words_that_no_shell_reads(tmp_path: Path) -> None:
    path = tmp_path / "silo.toml"
    head = (
        'silo_id = "north"\ndata = "d"\nfederation = "f"\naddress = "a:1"\nroot_digest = "'
        + "a" * 64
        + '"\n'
    )

    def of(line: str) -> TrainingSettings:
        path.write_text(f"{head}[training]\n{line}\n")
        return load_settings(SiloSettings, path).training

    assert of("").launcher == of('launcher = "local"').launcher == "local"
    words = ("srun", "-N", "2", "--comment=two words", "{python}", "-m", "ddm.training", "{folder}")
    text = "launcher = \"srun -N 2 '--comment=two words' {python} -m ddm.training {folder}\""
    assert of(text).launcher == of(f"launcher = {json.dumps(words)}").launcher == words
    values = {
        "python": "/usr/bin/python3",
        "folder": "/a folder/ü",
        "processes": "2",
        "launch": "x",
    }
    assert filled(words, values)[-4:] == ["/usr/bin/python3", "-m", "ddm.training", "/a folder/ü"]
    assert filled(('{"image": "x", "command": "{folder}"}',), values) == [
        '{"image": "x", "command": "/a folder/ü"}'
    ]
    for line, said in [
        (
            'launcher = "srun train {folder} | tee log"',
            "no shell reads this command, so '|' means nothing in it",
        ),
        ('launcher = "srun $HOME {folder}"', "'$' means nothing"),
        (
            'launcher = ["srun", "{fodler}", "{folder}"]',
            "{fodler} is none of {folder}, {launch}, {processes}, {python}",
        ),
        ('launcher = "srun"', "must name the job's folder: {folder}"),
        ("launcher = []", "must name the job's folder"),
        ('launcher = ["srun", 3, "{folder}"]', "a list of words, or one text"),
        ('jobs = "/shared"', "jobs is for a launcher"),
        ('launcher = "srun {folder}"\njobs = "shared"', "jobs must be an absolute path"),
        ("processes = 65", "at most 64 on one machine"),
        ('launcher = "/opt/bin/torchrun -m ddm.training {folder}"', "torchrun runs the commands"),
        ('launcher = ["bash", "-c", "torchrun -m ddm.training {folder}"]', "torchrun runs"),
        ('launcher = "{python} -m torch.distributed.run {folder}"', "torchrun runs"),
        ('launcher = "accelerate launch -m ddm.training {folder}"', "torchrun runs"),
    ]:
        with (
            case(line=line),
            pytest.raises(SetupError, check=has_subject("silo.toml, field training")) as caught,
        ):
            of(line)
        with case(line=line):
            assert said in str(caught.value)
    with pytest.raises(ValidationError):
        TrainingSettings(launcher=("srun\0", "{folder}"))


def stored(path: Path, num: int, seed: int) -> FileArray:
    np.save(path, np.random.default_rng(seed).random((num, 1, 4, 4), dtype=np.float32))
    return open_npy(path)


def test_inputs_are_the_same_images_wherever_they_lie(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job")
    folder.path.mkdir()
    one = stored(tmp_path / "1.npy", 5, 1)
    two = stored(tmp_path / "2.npy", 4, 2)
    lying: Images = StoredImages(JoinedArrays((one, two)), as_floats, (1, 4, 4))
    chosen = torch.tensor([0, 3, 4, 5, 8])
    texts = torch.zeros(5, 3, 2)
    texts[:, 0] = torch.rand(5, 2)
    for images, labels in [
        (lying[:], torch.arange(9)),
        (lying, torch.arange(9)),
        (SelectedImages(lying, chosen), texts),
        (SelectedImages(ScaledImages(lying, 0.3, 1.7), chosen), texts),
        (ScaledImages(ScaledImages(lying, 0.3, 1.7), 0.1, 2.0), torch.arange(9)),
    ]:
        for is_complete in (False, True):
            with case(images=type(images).__name__, is_complete=is_complete):
                kept = write_inputs(
                    {"images": images, "labels": labels}, {}, folder, is_complete=is_complete
                )
                opened = open_input(kept["images"], folder)
                labels_again = open_input(kept["labels"], folder)
                some_rows = torch.tensor([2, 0])
                assert torch.equal(opened[:], images[:])
                assert torch.equal(opened[some_rows], images[some_rows])
                assert isinstance(labels_again, torch.Tensor)
                assert torch.equal(labels_again, labels) and labels_again.dtype == labels.dtype
                refers = not is_complete and isinstance(images, StoredImages | SelectedImages)
                assert (kept["images"].kind == "referred") == refers


def result_of(trial: SmallJob, **changes: object) -> TrainingResult:
    """A result as a job would leave it, with an expert of the right names and shapes."""
    tensors = trial.task.expert.start().state_dict()
    save_file(tensors, trial.folder.expert)
    whole = {"steps": 100, "loss": 0.5, "seconds": 1.0, "flops": 1.0, "work": trial.task.work}
    whole["expert"] = File.of("expert.safetensors", trial.folder.expert)
    return TrainingResult.model_validate(whole | changes)


def with_nan(trial: SmallJob) -> TrainingResult:
    tensors = load_file(trial.folder.expert)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, trial.folder.expert)
    return result_of_file(trial)


def without_one(trial: SmallJob) -> TrainingResult:
    tensors = load_file(trial.folder.expert)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, trial.folder.expert)
    return result_of_file(trial)


def result_of_file(trial: SmallJob) -> TrainingResult:
    file = File.of("expert.safetensors", trial.folder.expert)
    return TrainingResult(
        work=trial.task.work, steps=100, loss=0.5, seconds=1.0, flops=1.0, expert=file
    )


def by_link(trial: SmallJob) -> TrainingResult:
    secret = trial.path / "secret"
    trial.folder.expert.rename(secret)
    trial.folder.expert.symlink_to(secret)
    return result_of_file(trial)


def of_another_length(trial: SmallJob) -> TrainingResult:
    return result_of(trial, expert=File(path="expert.safetensors", bytes=10, digest="a" * 64))


def of_other_bytes(trial: SmallJob) -> TrainingResult:
    known = result_of(trial)
    return known.model_copy(update={"expert": known.expert.model_copy(update={"digest": "a" * 64})})


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (with_nan, TensorFileError),
        (without_one, TensorFileError),
        (by_link, ArchipelagoError),
        (of_another_length, TensorFileError),
        (of_other_bytes, DigestError),
        (lambda trial: result_of(trial, steps=99), DocumentError),
    ],
    ids=["not finite", "other tensors", "a link", "other length", "other bytes", "other steps"],
)
def test_result_is_refused_that_is_no_expert_of_the_plan(
    tmp_path: Path, spoil: Callable[[SmallJob], TrainingResult], error: type[Exception]
) -> None:
    trial = SmallJob(tmp_path)
    trial.folder.path.mkdir()
    write_document(result_of(trial), trial.folder.result)
    write_document(spoil(trial), trial.folder.result)
    with pytest.raises(error):
        trial()
    assert not trial.expert.exists() and not list(tmp_path.glob("kept/.*"))
    assert not trial.folder.result.exists(), "the next call trains"
    control = SmallJob(tmp_path / "control")
    control.folder.path.mkdir(parents=True)
    write_document(result_of(control), control.folder.result)
    assert control().steps == 100 and control.expert.exists() and not control.progress


def test_result_of_other_work_is_not_taken(tmp_path: Path) -> None:
    trial = SmallJob(tmp_path, task=small_task(num_steps=3))
    trial.folder.path.mkdir()
    write_document(result_of(trial, work="b" * 64), trial.folder.result)
    trial()
    assert trial.progress[-1].step == 3, "it was trained"


def launch(**changes: object) -> Launch:
    known = {
        "launch_id": "one",
        "work": small_task().work,
        "by": "command",
        "host": "h",
        "pid": 1,
        "started": 0,
    }
    return Launch.model_validate(known | changes)


def test_job_of_a_command_is_followed_by_whoever_comes_next_and_never_started_twice(
    tmp_path: Path,
) -> None:
    """The worker that started it is dead: another finds launch.json, and takes what the job leaves."""
    marks = tmp_path / "started"
    settings = TrainingSettings(launcher=("touch", str(marks), "{folder}"), device="cpu")
    trial = SmallJob(tmp_path, settings)
    trial.folder.path.mkdir()
    write_document(launch(), trial.folder.launch)
    run = trial.folder.run("one")
    seen = threading.Event()

    def job() -> None:
        for count in range(1, 4):
            seen.wait(0.2)
            fields = {
                "step": 10 * count,
                "num_steps": 100,
                "loss": 0.5,
                "steps_per_second": 1.0,
                "seconds": 1.0,
            }
            write_transient(Heartbeat(count=count).model_copy(update=fields), run.heartbeat)
        write_document(result_of(trial), trial.folder.result)

    thread = threading.Thread(target=job)
    thread.start()
    try:
        trial()
    finally:
        thread.join()
    assert trial.progress and trial.progress[-1].step == 30 and trial.expert.exists()
    assert not marks.exists()


def test_command_that_fails_is_started_again_and_at_last_named_with_what_it_said(
    tmp_path: Path,
) -> None:
    words = (
        "bash",
        "-c",
        'echo x >> "$1/../starts"; echo no such partition; exit 3',
        "-",
        "{folder}",
    )
    trial = SmallJob(tmp_path, TrainingSettings(launcher=words, device="cpu", retries=2))
    with pytest.raises(SetupError, check=has_subject("training.launcher")):
        trial()
    assert (tmp_path / "starts").read_text() == "x\nx\n"


def test_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    trial = SmallJob(
        tmp_path, TrainingSettings(launcher=("nosuchprogram", "{folder}"), device="cpu")
    )
    with pytest.raises(SetupError, check=has_subject("training.launcher")):
        trial()


def test_command_inherits_neither_descriptors_nor_a_terminal_and_its_end_is_noted(
    tmp_path: Path,
) -> None:
    script = (
        'cd "$1/.."; ls -l /proc/self/fd > fds; echo "$PYTHONSAFEPATH" > safe; '
        "ps -o sid= -p $$ > sid; echo $$ > pid"
    )
    words = ("bash", "-c", script, "-", "{folder}")
    trial = SmallJob(
        tmp_path, TrainingSettings(launcher=words, device="cpu", start_s=1.0, retries=1)
    )
    with (tmp_path / "open").open("w") as opened:
        opened.fileno()
        with pytest.raises(SetupError, check=has_subject("training.launcher")):
            trial()
    assert str(tmp_path / "open") not in (tmp_path / "fds").read_text()
    assert (tmp_path / "safe").read_text() == "1\n", "Python imports nothing from the job's folder"
    assert (tmp_path / "sid").read_text().strip() == (tmp_path / "pid").read_text().strip(), (
        "it leads its own session"
    )


def test_process_of_an_earlier_start_ends_before_it_trains(tmp_path: Path) -> None:
    """Slurm may begin late what was given up long ago; the start in force is another."""
    trial = SmallJob(tmp_path, task=small_task(num_steps=1_000_000))
    stop = threading.Event()
    codes = list[int]()
    trial.folder.path.mkdir()
    write_job(trial.task, trial.folder, trial.settings)
    write_document(launch(launch_id="late"), trial.folder.launch)
    thread = threading.Thread(target=lambda: codes.append(train_folder(trial.folder, "late", stop)))
    thread.start()
    try:
        wait_until(
            lambda: (
                (beat := read_document(Heartbeat, trial.folder.run("late").heartbeat)) and beat.step
            ),
            "progress",
        )
        write_document(launch(launch_id="two"), trial.folder.launch)
        thread.join(60)
    finally:
        stop.set()
        thread.join()
    assert codes == [130]
    beat = read_document(Heartbeat, trial.folder.run("late").heartbeat)
    assert beat is not None and beat.ended and beat.step < 1_000_000


def test_job_whose_plan_was_changed_is_refused(tmp_path: Path) -> None:
    trial = SmallJob(tmp_path)
    trial.folder.path.mkdir()
    write_job(trial.task, trial.folder, trial.settings)
    assert trial.folder.read_job()[1] == trial.task.expert.plan
    trial.folder.plan.write_bytes(trial.folder.plan.read_bytes().replace(b"0.01", b"0.02"))
    with pytest.raises(DigestError):
        trial.folder.read_job()
    assert train_folder(trial.folder, None, threading.Event()) == DigestError.exit_code
    (said,) = trial.folder.run("byhand").failures()
    assert (said.kind, said.code, said.subject) == ("ours", DigestError.exit_code, "plan.json")


def test_as_many_processes_train_as_the_job_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that each believe to be alone would write into one folder."""
    trial = SmallJob(
        tmp_path, TrainingSettings(device="cpu", processes=2, launcher=("srun", "{folder}"))
    )
    trial.folder.path.mkdir()
    write_job(trial.task, trial.folder, trial.settings)
    assert train_folder(trial.folder, None, threading.Event()) == SetupError.exit_code
    (said,) = trial.folder.run("byhand").failures()
    assert (
        said.subject == "training.processes"
        and said.got is not None
        and said.got.startswith("1, as")
    )


def test_stopped_follower_stops_the_job(tmp_path: Path) -> None:
    trial = SmallJob(tmp_path, BY_COMMAND)
    trial.folder.path.mkdir()
    write_transient(Heartbeat(count=1), trial.folder.run("one").heartbeat)
    follower = StartFollower(trial.folder, launch(), LaunchCommand.of_earlier(launch()), BY_COMMAND)

    def end_when_asked() -> None:
        wait_until(follower.run.stop.exists, "the word to stop")
        write_transient(Heartbeat(count=2, ended=True), follower.run.heartbeat)

    thread = threading.Thread(target=end_when_asked)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            follower.follow(trial.task.work, lambda progress: None, lambda: True)
    finally:
        thread.join()


def test_job_of_a_plan_that_was_given_up_ends_and_its_images_go(tmp_path: Path) -> None:
    mine, other = (
        JobFolder(tmp_path / "jobs" / plan / "north")
        for plan in ("mine-00000001", "other-00000001")
    )
    for folder in (mine, other):
        write_inputs(small_task().inputs, {}, folder, is_complete=True)
    discard_others(tmp_path / "jobs", "mine-00000001")
    assert mine.array("images").exists() and not other.path.exists()


TEMPLATES = Path(__file__).parents[3] / "examples" / "launchers"


def test_templates_of_launchers_parse_and_name_what_exists(tmp_path: Path) -> None:
    head = {
        "silo_id": "north",
        "data": "d",
        "federation": "f",
        "address": "a:1",
        "root_digest": "a" * 64,
    }
    templates = sorted(TEMPLATES.glob("*.toml"))
    assert {path.stem for path in templates} == {"kubernetes", "slurm", "slurm-batch"}
    for path in templates:
        with case(template=path.name):
            settings = SiloSettings.model_validate(head | tomllib.loads(path.read_text())).training
            assert settings.launcher != "local"
            named = [
                TEMPLATES / Path(word).name
                for word in settings.launcher
                if word.startswith("/srv/")
            ]
            assert all(path.is_file() for path in named), named
            said = " ".join([*settings.launcher, *(path.read_text() for path in named)])
            assert "{launch}" in said, (
                "a start that was given up could not be told from the one in force"
            )
            if "kubectl" not in said:
                assert "-P -m ddm.training" in said
    batch = (TEMPLATES / "archipelago.sbatch").read_text()
    assert subprocess.run(["bash", "-n"], input=batch, text=True, check=False).returncode == 0
    (number,) = re.findall(r"^#SBATCH --ntasks=(\d+)$", batch, re.MULTILINE)
    assert tomllib.loads((TEMPLATES / "slurm-batch.toml").read_text())["training"][
        "processes"
    ] == int(number)


def kubernetes(*words: str) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(TEMPLATES / "kubernetes-launch.sh"), *words]
    return subprocess.run(
        script, env=os.environ | {"PRINT": "1"}, capture_output=True, text=True, check=False
    )


def test_template_of_kubernetes_starts_each_process_with_its_number() -> None:
    result = kubernetes("/shared/archipelago/job", "abc123", "2")
    job = yaml.safe_load(result.stdout)
    assert "@" not in result.stdout
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert member_of(variables | {"RANK": "1"}) == Member(1, 2, 0, False, "--")
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"
    assert container["args"] == [
        'exec env RANK="$JOB_COMPLETION_INDEX" python -P -m ddm.training /shared/archipelago/job --launch abc123'
    ]
    assert container["workingDir"] == "/"
    assert kubernetes("/shared/a b; rm", "abc123", "2").returncode == 2


def test_pods_of_kubernetes_reach_each_other_and_nobody_else() -> None:
    job = yaml.safe_load(kubernetes("/shared/archipelago/job", "abc123", "2").stdout)
    policy = yaml.safe_load((TEMPLATES / "kubernetes-network.yaml").read_text())
    pods = {"podSelector": {"matchLabels": job["spec"]["template"]["metadata"]["labels"]}}
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"] == pods | {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [pods]}],
        "egress": [{"to": [pods]}],
    }


def test_no_pod_starts_in_kubernetes_where_the_network_could_not_be_closed(
    tmp_path: Path,
) -> None:
    calls = tmp_path / "calls"
    kubectl = tmp_path / "kubectl"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(TEMPLATES / "kubernetes-launch.sh"), "/shared/job", "abc123", "2"]
    for code, num_calls in ((1, 1), (0, 2)):
        with case(code=code):
            kubectl.write_text(f'#!/bin/sh\necho "$3" >> {calls}\nexit {code}\n')
            kubectl.chmod(0o755)
            calls.unlink(missing_ok=True)
            result = subprocess.run(script, env=environment, capture_output=True, check=False)
            assert result.returncode == code
            applied = calls.read_text().split()
            assert len(applied) == num_calls and applied[0].endswith("kubernetes-network.yaml")
