#!/usr/bin/env bash
# First contact with a machine that has an NVIDIA GPU, in commands of at most ten minutes each.
#
#     tools/gpu_first_contact.sh wheels     where there is a network: the wheel and what it needs, in build/gpu/wheels
#                                           with PYTHON= a Python of the version that the machine with the GPU has
#     tools/gpu_first_contact.sh probe      installs from there, without a network, beside the machine's torch; then
#                                           asks for facts: build/gpu/probe.json
#     tools/gpu_first_contact.sh test       tests/gpu, with options for pytest: test -n 4
#     tools/gpu_first_contact.sh measure    the rows of docs/gpu.md, in at most six minutes: build/gpu/gpu.md; other
#                                           sections of bench/gpu.py by name: measure "1 MB" "1 GB"
#
# The last three need a GPU. Without one they print that there is none, and exit with 0.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-python3}")
PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") # found after cd too
PLACE=$PWD/build/gpu
SITE=$PLACE/site

case "${1:-}" in
  wheels)
    rm -rf "$PLACE/wheels" && mkdir -p "$PLACE/wheels"
    "$PYTHON" -m pip wheel -q --no-deps --wheel-dir "$PLACE/wheels" .
    # torch is the machine's own, and so is numpy, which tensordict needs beside these.
    "$PYTHON" -m pip download -q --no-deps --dest "$PLACE/wheels" tensordict
    "$PYTHON" -m pip download -q --dest "$PLACE/wheels" cloudpickle orjson packaging 'pyvers<0.3' importlib_metadata \
      psutil cuda-bindings 'pytest>=9,<9.1' pytest-timeout pytest-xdist
    ls "$PLACE/wheels"
    exit 0 ;;
  probe | test | measure) ;;
  *) sed -n '3,12s/^# \{0,4\}//p' "$0"; exit 2 ;;
esac

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L | grep -q GPU; then
  echo "skipped: nvidia-smi shows no GPU on this machine"
  exit 0
fi
# torch is the machine's own, and so are the bindings of its CUDA if it has them. Not a virtual environment: one made from
# another does not see that one's packages.
if [ ! -d "$SITE" ] || [ "$PLACE/wheels" -nt "$SITE" ]; then
  wheels=("$PLACE"/wheels/*.whl)
  if "$PYTHON" -c "import cuda.bindings" 2>/dev/null; then
    mapfile -t wheels < <(printf '%s\n' "${wheels[@]}" | grep -v '/cuda_[^/]*$')
  fi
  rm -rf "$SITE.new"
  "$PYTHON" -m pip install -q --no-index --no-deps --target "$SITE.new" "${wheels[@]}"
  rm -rf "$SITE" && mv "$SITE.new" "$SITE" && touch "$SITE"
fi
export PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH}
export TORCHINDUCTOR_COMPILE_THREADS=1

case "$1" in
  probe) cd / && timeout 590 "$PYTHON" "$OLDPWD/tools/gpu_probe.py" | tee "$PLACE/probe.json" ;;
  test) cd / && timeout 590 "$PYTHON" -m pytest -q -rs -p no:cacheprovider -c "$OLDPWD/pyproject.toml" \
    --rootdir "$OLDPWD" -m '' "$OLDPWD/tests/gpu" "${@:2}" ;;
  measure) shift && cd bench && timeout 340 "$PYTHON" gpu.py --out "$PLACE" --sections "${@:-the aims}" ;;
esac
