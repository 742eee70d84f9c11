#!/usr/bin/env bash
# Compile and interpreter tests on another Triton release: tests/matrix.sh PYTHON TRITON_VERSION [quick]
# Uses a small environment of its own in front of PYTHON's packages, so that only Triton (and numpy) differ.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 version=$2 quick=${3:-}
venv=.venv-triton-$version
if [ ! -f "$venv/.ready" ]; then
  "$python" -m venv "$venv"
  packages=("triton==$version")
  [ "$version" = 3.6.0 ] && packages+=("numpy<2.4")  # its interpreter cannot run dynamic loops with a newer numpy
  "$venv/bin/python" -m pip install -q --no-deps "${packages[@]}"
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$site" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pinned.pth"
  touch "$venv/.ready"
fi
export TRITON_CACHE_DIR=$PWD/.cache/triton-$version
"$venv/bin/python" -c "import triton, torch; print('triton', triton.__version__, 'torch', torch.__version__)"
"$venv/bin/python" -m pytest -q tests/aot ${quick:+-m quick}
TRITON_INTERPRET=1 "$venv/bin/python" -m pytest -q tests/interpret ${quick:+-m quick}
