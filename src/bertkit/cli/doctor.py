"""`bertkit doctor`: what works on this machine and installation.

The checks are in bertkit.doctor; sibling bench.py measures speed.
"""

from __future__ import annotations

from bertkit.cli.console import console, result
from bertkit.cli.options import Common
from bertkit.run import runs_root


def doctor(*, common: Common) -> None:
    """Check this machine and installation: versions, processor, kernels, disk, network, and a tiny training run.

    It takes a few seconds and changes nothing. The exit code is 5 if something prevents bertkit from working.
    """
    from dataclasses import asdict

    from bertkit.doctor import diagnoses
    from bertkit.errors import CheckError

    found = []
    for each in diagnoses(offline=common.offline, runs_root=runs_root()):
        found.append(each)
        if not common.as_json:
            result(f"{each.verdict:<8}{each.name}: {each.found}")
        if each.remedy:
            console.warn(f"{each.name}: {each.remedy}")
    faults = [each.name for each in found if each.verdict == "fault"]
    if common.as_json:
        result({"ok": not faults, "checks": [asdict(each) for each in found]}, as_json=True)
    if faults:
        raise CheckError(f"failed checks: {', '.join(faults)}")
