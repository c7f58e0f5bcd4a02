#!/usr/bin/env bash
# Run the suite in an environment of its own that holds the lowest versions the packages declare.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv venv --quiet --python "${PYTHON:-3.11}" "$work/venv"
packages=()
for folder in packages/*/; do packages+=("--editable" "$root/$folder"); done
uv export --quiet --only-group dev --no-hashes --no-emit-workspace 2>/dev/null \
    | grep -vE '^(torch|triton|numpy|zarr|nvidia|cuda)' > "$work/dev.txt"
# From outside the workspace, whose own constraints would hold torch at the version of the lock.
cd "$work"
uv pip install --quiet --python "$work/venv/bin/python" --resolution lowest-direct "${packages[@]}" "zarr>=3.0.8"
uv pip install --quiet --python "$work/venv/bin/python" -r "$work/dev.txt"
cd "$root"
"$work/venv/bin/python" -c 'import torch, numpy; print("torch", torch.__version__, "numpy", numpy.__version__)'
"$work/venv/bin/python" -m pytest "$@"
