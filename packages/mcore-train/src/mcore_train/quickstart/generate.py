"""A sample of what the trained model writes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def sample(checkpoints: Path, prompt: str, *, max_tokens: int = 64) -> str | None:
    """Return `prompt` continued by `mcore-inference generate`, or None where it is not installed.

    The two packages do not import each other; the command is what joins them.

    Raises:
        ValueError: the command failed; with its message.
    """
    if importlib.util.find_spec("mcore_inference") is None:
        return None
    command = [
        *(sys.executable, "-m", "mcore_inference", "generate"),
        *("--checkpoint", str(checkpoints), "--prompt", prompt, "--max-tokens", str(max_tokens)),
        *("--temperature", "0.7", "--top-p", "0.95", "--seed", "1"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"mcore-inference generate failed: {result.stderr.strip()}")
    return result.stdout.rstrip("\n")
