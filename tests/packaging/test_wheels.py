"""Every package builds, installs alone into a fresh environment and imports."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BRINGS = {
    "mcore-parallel": {"mcore-parallel"},
    "mcore-kernels": {"mcore-kernels"},
    "mcore-models": {"mcore-models", "mcore-parallel", "mcore-kernels"},
    "mcore-data": {"mcore-data"},
    "mcore-ckpt": {"mcore-ckpt", "mcore-parallel"},
    "mcore-inference": {
        "mcore-inference",
        "mcore-models",
        "mcore-data",
        "mcore-ckpt",
        "mcore-parallel",
        "mcore-kernels",
    },
    "mcore-train": {
        "mcore-train",
        "mcore-models",
        "mcore-data",
        "mcore-ckpt",
        "mcore-parallel",
        "mcore-kernels",
    },
    "mcore-rl": {
        "mcore-rl",
        "mcore-train",
        "mcore-inference",
        "mcore-models",
        "mcore-data",
        "mcore-ckpt",
        "mcore-parallel",
        "mcore-kernels",
    },
}
IMPORT = """
import sys, {root}, {root}.cli
loaded = sorted({{"triton", "transformer_engine", "apex"}} & set(sys.modules))
assert not loaded, loaded
"""


def run(*command: str, cwd: Path | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    found = shutil.which("uv")
    if found is None:
        pytest.skip("needs uv on the PATH")
    return found


@pytest.fixture(scope="module")
def wheels(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight wheels, built from a copy of the sources."""
    work = tmp_path_factory.mktemp("build")
    for name in ("packages", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, work / name)
    run(uv, "build", "--all-packages", "--wheel", "--out-dir", str(work / "dist"), cwd=work)
    return work / "dist"


@pytest.fixture(scope="module")
def pins(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of this environment, so that a test installs what is already here."""
    listed = run(uv, "pip", "freeze", "--python", sys.executable).splitlines()
    path = tmp_path_factory.mktemp("pins") / "constraints.txt"
    path.write_text("\n".join(line for line in listed if "==" in line and "mcore" not in line))
    return path


def test_wheels_carry_types_license_and_sources(wheels: Path) -> None:
    built = sorted(wheels.glob("*.whl"))
    assert [w.name.split("-")[0].replace("_", "-") for w in built] == sorted(BRINGS)
    for wheel in built:
        names = zipfile.ZipFile(wheel).namelist()
        root = wheel.name.split("-")[0]
        assert f"{root}/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        assert all(name.startswith((f"{root}/", f"{root}-")) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(BRINGS))
def test_installs_alone_and_imports(
    uv: str, wheels: Path, pins: Path, tmp_path: Path, package: str
) -> None:
    """U01: a clean environment; importing loads no accelerator library (CUDA build of torch).

    All lie at one place, one after the other, so that torch is compiled for the first alone.
    """
    venv = wheels.parent / "venv"
    python = venv / "bin" / "python"
    run(uv, "venv", "--clear", "--python", sys.executable, str(venv))
    install = ["pip", "install", "--python", str(python), "--find-links", str(wheels)]
    run(uv, *install, "--constraint", str(pins), package)
    listed = run(uv, "pip", "freeze", "--python", str(python)).splitlines()
    ours = {line.split("==")[0].split(" ")[0] for line in listed if line.startswith("mcore")}
    assert ours == BRINGS[package]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPYCACHEPREFIX"] = str(wheels.parent / "compiled")
    root = package.replace("-", "_")
    result = subprocess.run(
        [str(python), "-W", "error", "-c", IMPORT.format(root=root)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    if package == "mcore-data":
        assert not any(line.startswith("torch==") for line in listed)
    shutil.rmtree(venv)
