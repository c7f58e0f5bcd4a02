"""Runs the tests of `triton/` with Triton's interpreter, in one process of their own."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.slow
def test_triton_kernels_in_the_interpreter(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    result = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(FOLDER), "-m", "not gpu", "-p", "no:cacheprovider",
            f"--junitxml={report}", "-o", "junit_family=xunit2",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, "-1")) for key in ("tests", "skipped", "failures", "errors")}
    assert counts["tests"] >= 10
    assert (counts["skipped"], counts["failures"], counts["errors"]) == (0, 0, 0), counts
