#!/usr/bin/env bash
# Make .venv with everything the pipeline and its tests need. Runs again only when the requirements changed.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=gpu; else kind=cpu; fi
stamp=.venv/.eagle3dvc-$kind
want=$(cat scripts/setup.sh pyproject.toml requirements/cpu.lock | sha256sum | cut -d' ' -f1)

configure_dvc() {
  # a private, lasting place for DVC's table of file hashes (its default is world-writable and under /var/tmp)
  [ -d .dvc ] || return 0
  .venv/bin/dvc config --local core.site_cache_dir "$PWD/.dvc/site-cache"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  grep -qs "$PWD/.dvc/site-cache" .dvc/config.local || configure_dvc
  exit 0
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
  for p in python3.11 python3.12 python3.13 python3; do
    if command -v "$p" >/dev/null 2>&1 && "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$p
      break
    fi
  done
fi
[ -n "$python" ] || die "Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python"

if [ ! -x .venv/bin/python ]; then
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || die "cannot make a virtual environment: install the venv package of $python (Debian: python3-venv)"
fi
pip() { .venv/bin/python -m pip "$@"; }

if [ "$kind" = gpu ]; then
  say "NVIDIA GPU found: installing eagle3dvc with the gpu, ray and dev extras"
  pip install -q -e '.[gpu,ray,dev]'
else
  torch=$(grep -o '^torch==[^ ]*' requirements/cpu.lock)
  say "no NVIDIA GPU: installing requirements/cpu.lock ($(grep -c '==' requirements/cpu.lock) packages, about 4 GB, some minutes)"
  index=()
  if ! pip download -q --no-deps --dest .venv/wheels "$torch" >/dev/null 2>&1; then
    say "$torch is in none of pip's configured places nor on PyPI; using PyTorch's own index https://download.pytorch.org/whl/cpu"
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
  else
    index=(--find-links .venv/wheels)
  fi
  # a full lock and --no-deps: torchvision, torchaudio and torchcodec of PyPI are CUDA builds that break imports beside a CPU torch
  pip install -q --no-deps "${index[@]}" -r requirements/cpu.lock
  rm -rf .venv/wheels
  pip install -q --no-deps --no-build-isolation -e .
fi
configure_dvc
printf '%s' "$want" >"$stamp"
say "done"
