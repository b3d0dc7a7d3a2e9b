"""What the doctor has found: a line for each finding."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

OK, WARNING, WRONG = "ok", "warning", "wrong"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was checked.
        status: :data:`OK`, :data:`WARNING` or :data:`WRONG`.
        text: what was found.
        remedy: what to do where the status is not ok.
    """

    name: str
    status: str
    text: str
    remedy: str = ""


def show(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Prints the findings; returns 1 if one is wrong."""
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            remedy = f" {finding.remedy}" if finding.remedy else ""
            sys.stdout.write(f"{finding.status:<8}{finding.name:<{width}}  {finding.text}{remedy}\n")
    return int(any(finding.status == WRONG for finding in findings))
