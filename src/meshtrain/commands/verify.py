"""`meshtrain verify PATH`: whether checkpoints and model directories are what was written. How to look is state/verify.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from meshtrain.convert.llama import llama_shapes
from meshtrain.errors import Refused
from meshtrain.flags import check_flags
from meshtrain.state.verify import verify
from meshtrain.state.verify_findings import LEVELS, Finding, Report

_DESCRIPTION = """Check a checkpoint, a folder of checkpoints, the folder of a run (--out), a Hugging Face directory or one
.safetensors file. All that is wrong is listed, the worst first, then the verdict. Status 0: good; 1: damaged or wrong; 2:
there is nothing to verify. Changes nothing, and may run while the run goes on."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    check_flags(arguments, ("headers", "json"), "meshtrain verify", positional=True)
    # Not tyro, whose import takes longer than the quick look.
    parser = argparse.ArgumentParser("meshtrain verify", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("path", metavar="PATH", help="what to verify, such as OUT or OUT/checkpoints/step-00000100")
    parser.add_argument(
        "--headers",
        action="store_true",
        help="read headers, sizes, index and JSON only: quick, but finds no flipped bit (without it, every byte is read)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    given = parser.parse_args(list(arguments))
    # One stream of bytes: threads of torch, which is not imported yet, would only wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    reports = list(verify(given.path, full=not given.headers, shapes=llama_shapes))
    seconds = time.monotonic() - begin
    if all(report.gone for report in reports):
        raise Refused(
            f"{given.path}: was removed or replaced while it was read. Verify it again, or what took its place"
        )
    if given.json:
        print(json.dumps(_as_json(given.path, reports, seconds, full=not given.headers)))
    else:
        for line in (*_lines(given.path, reports), _summary(reports, seconds, full=not given.headers)):
            print("".join(each if each.isprintable() else ascii(each)[1:-1] for each in line))
    return 0 if _verdict(reports) == "good" else 1


def _verdict(reports: Sequence[Report]) -> str:
    found = {report.verdict for report in reports}
    return next(verdict for verdict in ("damaged", "wrong", "good") if verdict in found)


def _sorted(root: str, reports: Sequence[Report]) -> list[Finding]:
    """The findings of all reports, files named below `root`, the worst first."""
    found = []
    for report in reports:
        below = os.path.relpath(report.path, root)
        for finding in report.findings:
            parts = [part for part in (below if below != "." else "", finding.file) if part]
            found.append(finding._replace(file="/".join(parts)))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _lines(root: str, reports: Sequence[Report]) -> Iterator[str]:
    for finding in _sorted(root, reports):
        yield finding.line()
    for report in reports:
        if report.gone:
            yield f"gone     {os.path.relpath(report.path, root)}: was removed while it was read; nothing is said of it"


def _summary(reports: Sequence[Report], seconds: float, *, full: bool) -> str:
    looked_at = [report for report in reports if not report.gone and (report.files or report.verdict != "good")]
    bad = [report for report in looked_at if report.verdict != "good"]
    warnings = sum(finding.level == "warning" for report in reports for finding in report.findings)
    of = f" ({len(bad)} of {len(looked_at)})" if len(looked_at) > 1 and bad else ""
    how = f"{sum(report.bytes_read for report in reports) / 1e9:.2f} GB of tensors read" if full else "headers only"
    return (
        f"{_verdict(reports)}{of}: {len(looked_at)} looked at, {sum(report.files for report in reports)} files, "
        f"{sum(report.tensors for report in reports)} tensors, {how}, {warnings} warnings, {seconds:.2f} s"
    )


def _as_json(root: str, reports: Sequence[Report], seconds: float, *, full: bool) -> dict[str, Any]:
    return {
        "path": root,
        "verdict": _verdict(reports),
        "full": full,
        "findings": [finding._asdict() for finding in _sorted(root, reports)],
        "checked": [
            {
                "path": str(report.path), "verdict": "gone" if report.gone else report.verdict, "files": report.files,
                "tensors": report.tensors, "bytes_read": report.bytes_read,
            }
            for report in reports
        ],
        "seconds": round(seconds, 3),
    }  # fmt: skip
