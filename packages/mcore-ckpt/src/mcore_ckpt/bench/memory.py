"""How much memory something takes at most."""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")


def forget_peak(process: Path = _PROCESS) -> bool:
    """Let the peak of this process's memory begin anew; return whether the system can."""
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(process: Path = _PROCESS) -> int:
    """Return the most memory that this process has had since `forget_peak`."""
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{process}/status has no VmHWM")
