"""Path ownership: the one role that may list each path, so that no role can sign another's files.

Paths are relative to ``targets/``. Each path has at most one owner, which depends on the path only:

    <plan_id>/plan.json, <plan_id>/plan/*                              plans
    <plan_id>/{manifest.json, router.safetensors, ...}                 release
    <plan_id>/class_counts/*                                           release
    <plan_id>/silos/<silo_id>/*, one glob more per depth up to three   <plan_id>.<silo_id>
"""

import re

from ddm.protocol.base import PLAN_ID_PATTERN, SILO_ID_PATTERN

PLANS = "plans"
RELEASE = "release"
KEY_HISTORY = "key-history.json"
MANIFEST_PROOF_NAME = "manifest.tlog-proof"
CONSISTENCY_NAME = "log-consistency.json"
PLAN_PROOF_NAME = "plan/plan.tlog-proof"
PLAN_CONSISTENCY_NAME = "plan/log-consistency.json"
PLAN_LOG_NAMES = (PLAN_PROOF_NAME, PLAN_CONSISTENCY_NAME)
LOG_NAMES = (MANIFEST_PROOF_NAME, CONSISTENCY_NAME)
# Exact names in place of a pattern: a release cannot list a file that no reader knows.
RELEASE_NAMES = (
    "manifest.json",
    "router.safetensors",
    "README.md",
    "report.html",
    *LOG_NAMES,
    "model.sig",
    KEY_HISTORY,
)
# Folders below a silo's: `experts/<expert>/<file>`.
SILO_DEPTH = 3

_SILO_ROLE = re.compile(rf"({PLAN_ID_PATTERN})\.({SILO_ID_PATTERN})")


def is_plan_id(text: str) -> bool:
    """Whether `text` is ``<name>-<8 hex>``."""
    return re.fullmatch(PLAN_ID_PATTERN, text) is not None


def is_silo_id(text: str) -> bool:
    """Whether `text` is a valid silo id."""
    return re.fullmatch(SILO_ID_PATTERN, text) is not None


def silo_role(plan_id: str, silo_id: str) -> str:
    """Return the role that signs one silo's submission for one plan."""
    return f"{plan_id}.{silo_id}"


def split_silo_role(name: str) -> tuple[str, str] | None:
    """Return (plan_id, silo_id) of a silo's role, None for any other name."""
    match = _SILO_ROLE.fullmatch(name)
    if match is None:
        return None
    return match[1], match[2]


def delegated_paths(plan_id: str, role: str) -> list[str]:
    """List the path patterns that `targets` delegates to `role`: the rule of `owner` as TUF patterns."""
    if role == PLANS:
        return [f"{plan_id}/plan.json", f"{plan_id}/plan/*"]
    if role == RELEASE:
        return [f"{plan_id}/{name}" for name in (*RELEASE_NAMES, "class_counts/*")]
    # A `*` in a TUF pattern does not match a slash, so that each depth needs a pattern of its own.
    silo_id = role.removeprefix(f"{plan_id}.")
    return [f"{plan_id}/silos/{silo_id}" + "/*" * depth for depth in range(1, SILO_DEPTH + 1)]


def owner(path: str, plan_id: str) -> str | None:
    """Return the only role that may list `path` in a release of `plan_id`, or None."""
    match path.split("/"):
        case [plan, "plan.json"] | [plan, "plan", _] if plan == plan_id:
            return PLANS
        case [plan, name] if plan == plan_id and name in RELEASE_NAMES:
            return RELEASE
        case [plan, "class_counts", _] if plan == plan_id:
            return RELEASE
        case [plan, "silos", silo_id, *rest] if plan == plan_id and is_silo_id(silo_id):
            if 1 <= len(rest) <= SILO_DEPTH:
                return silo_role(plan_id, silo_id)
    return None
