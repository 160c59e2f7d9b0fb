#!/usr/bin/env bash
# What only a GPU can show, in one run under eight minutes: see docs/gpu.md.
#
#   gpu/check.sh [--quick]
#
# Needs no network. Takes the first Python that has a torch which sees a GPU: $PYTHON, .venv, then
# python3. Packages that it lacks are installed from a folder of wheels, .cache/wheels, into a folder of
# their own; where there are none either, it says which are missing.
# Exit: 0 all bars are met; 1 a bar is missed; 2 there is no GPU, or something is missing;
# 124 it took too long.

set -euo pipefail

readonly LIMIT_S=475
readonly NEEDED=(torch numpy psutil pydantic yaml rich typer highspy safetensors)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd -- "$root"

say() {
  printf 'gpu/check: %s\n' "$*" >&2
}

sees_gpu() {
  "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# Prints those of the packages that a Python cannot import, in one line.
missing_of() {
  "$1" - "${NEEDED[@]}" <<'PYTHON'
import importlib
import sys

missing = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
print(*missing)
PYTHON
}

python=
for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3; do
  if command -v -- "$candidate" >/dev/null && sees_gpu "$candidate"; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  say 'no Python here has a torch that sees a GPU; nothing was run'
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  say "$python is older than 3.11; nothing was run"
  exit 2
fi

export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
missing=$(missing_of "$python")
if [[ -n $missing && -d .cache/wheels ]]; then
  site=$(mktemp -d)
  trap 'rm -rf -- "$site"' EXIT
  say "installing from .cache/wheels, for $missing"
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --no-cache-dir --target "$site" .cache/wheels/*.whl
  export PYTHONPATH="$PYTHONPATH:$site"
  missing=$(missing_of "$python")
fi
if [[ -n $missing ]]; then
  say "$python lacks: $missing; put their wheels into .cache/wheels (see docs/gpu.md)"
  exit 2
fi

# Matrix products with the same bits each time; an allocator that loses little to fragments, under
# the name that newer and that older versions of torch read.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
export PYTORCH_ALLOC_CONF=expandable_segments:True
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader >&2 ||
  say 'nvidia-smi says nothing here'
status=0
timeout --kill-after=10 "$LIMIT_S" "$python" -m bench.gpu "$@" || status=$?
if ((status == 124 || status == 137)); then
  say "not over after $LIMIT_S s"
  status=124
fi
exit "$status"
