import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mcore_data.datasets.cache import cached_arrays, content_key

# Forks the builders, the first of which dies with one array written and the other not, when all
# others wait for it; prints what they read, how many built, and their exit statuses. Forked,
# because eight imports of numpy take seconds.
_BUILDERS = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from mcore_data.datasets.cache import cached_arrays

directory, count, locks = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "locks"
entered, says = os.pipe()
gate, opener = os.pipe()

def build_with(victim):
    def build():
        os.write(says, b".")
        if victim:
            os.read(gate, 1)  # all others are here
            real, calls = os.fsync, []
            def fsync(fd):
                calls.append(fd)
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(fd)
            os.fsync = fsync
        return {"a": np.arange(100_000), "b": np.arange(50_000) * 2}
    return build

if not locks:
    import fcntl
    def flock(file, operation, real=fcntl.flock):
        if not operation & fcntl.LOCK_NB:
            raise OSError("no locks here")
        real(file, operation)
    fcntl.flock = flock
children = []
for i in range(count):
    child = os.fork()
    if child == 0:
        arrays = cached_arrays(directory, "key", build_with(i == 0))
        text = f"{arrays['a'].sum()} {arrays['b'].sum()} {sorted(arrays)}"
        os.write(1, (text + "\\n").encode())
        os._exit(0)
    children.append(child)
    if i == 0:
        os.read(entered, 1)  # it has its turn
time.sleep(0.1)
os.write(opener, b".")
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
os.close(says)
print(1 + len(os.read(entered, 99)) if count > 1 else 1)
print(codes)
"""


def _builders(directory, count, locks="locks"):
    return [sys.executable, "-c", _BUILDERS, str(directory), str(count), locks]


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_many_processes_build_at_once(tmp_path, locks):
    """U15: eight builders, one killed midway; the others agree and nothing partial is seen.

    Where the file system has locks one of them builds in its stead, and none besides.
    """
    process = subprocess.Popen(
        _builders(tmp_path, 8, locks), stdout=subprocess.PIPE, text=True, bufsize=1
    )
    seen = set()
    while process.poll() is None:
        if (tmp_path / "key").exists():
            seen.add(tuple(sorted(os.listdir(tmp_path / "key"))))
        time.sleep(0.002)
    *outputs, built, codes = process.communicate()[0].splitlines()
    assert codes == str([-signal.SIGKILL] + [0] * 7)
    assert outputs == [f"{sum(range(100_000))} {sum(range(0, 100_000, 2))} ['a', 'b']"] * 7
    assert seen <= {("a.npy", "b.npy")}
    assert int(built) == 2 if locks == "locks" else int(built) >= 2
    assert not list(tmp_path.glob(".key.lock"))


def test_leftovers_of_a_killed_builder_are_swept(tmp_path):
    output = subprocess.run(_builders(tmp_path, 1), stdout=subprocess.PIPE, check=True).stdout
    assert output.decode().splitlines()[-1] == f"[{-signal.SIGKILL}]"
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2
    assert all(name.startswith(".key.") for name in left)
    built = cached_arrays(tmp_path, "key", lambda: {"a": np.arange(3)})
    assert os.listdir(tmp_path) == ["key"]
    assert built["a"].tolist() == [0, 1, 2]
    assert isinstance(built["a"], np.memmap)


def test_faults_of_the_disk_are_not_hidden(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            cached_arrays(tmp_path, "key", lambda: {"a": np.arange(3)})
    assert os.listdir(tmp_path) == []
    cached_arrays(tmp_path, "key", lambda: {"a": np.arange(3)})
    path = tmp_path / "key" / "a.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"key: damaged cache .* delete it"):
        cached_arrays(tmp_path, "key", dict)
    path.unlink()
    with pytest.raises(ValueError, match=r"key: damaged cache \(it has no a.npy\); delete it"):
        cached_arrays(tmp_path, "key", dict, ("a",))


def test_keys():
    a = np.arange(5)
    keys = [
        content_key({"x": 1}, a),
        content_key({"x": 2}, a),
        content_key({"x": 1}, a.astype(np.int32)),
        content_key({"x": 1}, a, a),
        content_key({"x": 1}, a + 1),
        content_key({"x": 1}),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key({"x": 1, "y": 2}, a) == content_key({"y": 2, "x": 1}, a.copy())
