"""The command `ddm push`: verifies a release and puts it into a repository of the Hugging Face Hub."""

from typing import Annotated

import typer

from ddm.cli.options import ReleaseArgument, Verification, grouped, warn_if_expired
from ddm.fetching.card import CardAdditions, hub_card
from ddm.system.console import say

RepositoryArgument = Annotated[
    str, typer.Argument(metavar="REPOSITORY", help="Repository of the Hub: hf://OWNER/NAME@BRANCH.")
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="Make the repository private, if it is new.")
]
BaseModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--base-model",
        metavar="NAME",
        help="A model of the Hub that training started from, for the card; repeatable.",
    ),
]
DataSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help="A data set of the Hub that experts were trained on, for the card; repeatable.",
    ),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="WORD", help="A further tag for the card; repeatable."),
]


@grouped
def push(
    release: ReleaseArgument,
    repository: RepositoryArgument,
    *,
    private: PrivateOption = False,
    base_model: BaseModelOption = None,
    dataset: DataSetOption = None,
    tag: TagOption = None,
    verification: Verification,
) -> None:
    """Push a release to the Hugging Face Hub, with its signatures and a card at the root; verifies first."""
    from ddm.fetching.opening import require_hub_address, require_hub_package
    from ddm.io.untrusted import list_files

    # Everything that options alone can get wrong is refused before the release is read, which may take minutes.
    address = require_hub_address(repository)
    additions = CardAdditions(base_model or (), dataset or (), tag or ())
    require_hub_package()
    from ddm.fetching.hub import push_release

    opened = verification.open(release)
    folder = opened.folder.parent.parent
    names = list(list_files(folder, skip_desktop_files=True))
    card = hub_card(
        (opened.folder / "README.md").read_text("utf-8"), opened.plan.plan_id, address, additions
    )
    pushed = push_release(folder, names, card, address, is_private=private)
    say(
        f"Pushed {opened.plan.plan_id}, version {opened.manifest.version}, to {address}: {pushed.num_files} files in "
        f"commit {pushed.commit}."
    )
    if pushed.num_removed:
        say(
            f"{pushed.num_removed} files of an earlier version were removed; earlier commits still hold them."
        )
    warn_if_expired(opened)
