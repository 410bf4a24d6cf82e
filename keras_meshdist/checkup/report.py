"""What `doctor` returns: checks, their findings, and how they are shown."""

import dataclasses
import json

from rich.console import Group
from rich.text import Text

OK, FINDING, SKIPPED = "ok", "finding", "skipped"
_MARKS = {OK: ("ok", "green"), FINDING: ("!!", "red"), SKIPPED: ("--", "dim")}

# Grows when a key of the JSON changes its meaning or goes.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what helps.

    Args:
        message: str, what is wrong.
        remedy: str, what helps.
    """

    message: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Check:
    """One question that was asked, and what came out.

    Args:
        name: str, the same in every version.
        message: str, what was seen.
        findings: tuple of `Finding`.
        skipped: bool, whether it couldn't be asked.
    """

    name: str
    message: str
    findings: tuple[Finding, ...] = ()
    skipped: bool = False

    @property
    def status(self):
        """`"ok"`, `"finding"` or `"skipped"`."""
        if self.findings:
            return FINDING
        return SKIPPED if self.skipped else OK


class Checkup:
    """What `kmd.doctor` found.

    Args:
        process: int, the process that made it.
        expected: int, how many processes there should be.
        processes: list of dict, what each process saw.
        checks: list of `Check`.
    """

    def __init__(self, process, expected, processes, checks):
        self.process = process
        self.expected = expected
        self.processes = processes
        self.checks = checks

    @property
    def findings(self):
        """List of all findings."""
        return [finding for check in self.checks for finding in check.findings]

    @property
    def ok(self):
        """Whether nothing was found."""
        return not self.findings

    def check(self, name):
        """Returns the check of a name."""
        return next(check for check in self.checks if check.name == name)

    def to_dict(self):
        """Returns all as plain values, as `meshdist doctor --json` prints."""
        return {
            "format": FORMAT,
            "ok": self.ok,
            "process": self.process,
            "expected_processes": self.expected,
            "checks": [
                {
                    "name": check.name,
                    "status": check.status,
                    "message": check.message,
                    "findings": [
                        dataclasses.asdict(finding)
                        for finding in check.findings
                    ],
                }
                for check in self.checks
            ],
            "processes": self.processes,
        }

    def to_json(self):
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def __repr__(self):
        found = ", ".join(c.name for c in self.checks if c.findings)
        return (
            f"<Checkup: {len(self.findings)} findings{found and ': '}{found}>"
        )

    def __rich__(self):
        lines = []
        for check in self.checks:
            mark, color = _MARKS[check.status]
            lines.append(
                Text.assemble(
                    (mark, color), f" {check.name:<11}{check.message}"
                )
            )
            for finding in check.findings:
                lines.append(Text(f"     {finding.message}", color))
                lines.append(Text(f"     remedy: {finding.remedy}"))
        count = len(self.findings)
        lines.append(
            Text("All is well." if not count else f"Findings: {count}.", "bold")
        )
        return Group(*lines)
