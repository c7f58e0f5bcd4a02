"""The committed lock pins versions and names no address, so that mirrors work."""

import importlib.util
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
assert SPEC is not None
assert SPEC.loader is not None
lock = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lock)


def committed_lock() -> str:
    """The lock as committed: uv rewrites the one in the work tree."""
    shown = subprocess.run(
        ["git", "show", "HEAD:uv.lock"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        pytest.skip("not a git checkout: the work tree's lock may have been rewritten by uv")
    return shown.stdout


def test_committed_lock_names_no_address() -> None:
    assert lock.addresses(committed_lock()) == []


def test_committed_lock_pins_every_package_with_hashes() -> None:
    packages = tomllib.loads(committed_lock())["package"]
    outside = [
        p for p in packages if "editable" not in p["source"] and "virtual" not in p["source"]
    ]
    assert len(outside) > 50
    for package in outside:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert files, package["name"]
        assert all(f["hash"].startswith("sha256:") for f in files), package["name"]
    assert next(p["version"] for p in outside if p["name"] == "torch").startswith("2.13.")


def test_neutral_removes_what_names_an_address() -> None:
    text = (
        '[[package]]\nname = "a"\nsource = { registry = "https://x.example/simple" }\n'
        'wheels = [\n    { url = "https://y.example/p/a-1.whl", hash = "sha256:0" },\n]\n\n'
        '[package.metadata]\nrequires-dist = [{ name = "b", index = "https://x.example/" }]\n\n'
        '[[package]]\nname = "b"\n'
    )
    assert len(lock.addresses(text)) == 3
    clean = lock.neutral(text)
    assert lock.addresses(clean) == []
    assert 'path = "a-1.whl"' in clean
    assert clean.count("[[package]]") == 2
