#!/usr/bin/env bash
# Builds the sdist, and from it the wheel for this Python, and that for the stable ABI if another Python is needed for it;
# checks them; installs the first wheel where nothing else of the repository is, and runs the quickstart and some tests
# there.
#
#     make wheel        (PYTHON=python3.12 for another one)
#
# What is built lies in build/wheel/dist. Wheels for other systems: CONTRIBUTING.md.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
ROOT=$PWD WORK=$PWD/build/wheel
TESTS=(tests/unit/project/test_project.py tests/engine/versions/test_never_torn.py tests/engine/death/test_reader_death.py)

rm -rf "$WORK/source" "$WORK/sdist" "$WORK/dist" "$WORK/unpacked" "$WORK/clean"
mkdir -p "$WORK/source" "$WORK/sdist" "$WORK/dist"
[ -x "$WORK/tools/bin/python" ] || "$PYTHON" -m venv "$WORK/tools"
if ! "$WORK/tools/bin/pip" install -q build auditwheel abi3audit; then
  echo "skipped: build, auditwheel and abi3audit cannot be had here"
  exit 0
fi

# A build in the repository itself would look through .venv too.
tar -c --exclude-vcs --exclude=./.venv --exclude=./build --exclude='./*-results' --exclude=__pycache__ --exclude='.*_cache' \
  --exclude='./shmsync/_native*' . | tar -x -C "$WORK/source"

echo "== sdist"
"$WORK/tools/bin/python" -m build -q --sdist --outdir "$WORK/dist" "$WORK/source"
tar -xzf "$WORK"/dist/*.tar.gz -C "$WORK/sdist" --strip-components=1
missing=$(comm -23 <(cd "$WORK/source" && find . -type f -not -path './.ci/*' -not -name .gitignore -not -path '*/__pycache__/*' | sort) \
  <(cd "$WORK/sdist" && find . -type f | sort))
if [ -n "$missing" ]; then echo "the sdist lacks:" $missing; exit 1; fi

echo "== wheel"
"$WORK/tools/bin/pip" wheel -q --no-deps --wheel-dir "$WORK/dist" "$WORK/sdist"
wheel=$(echo "$WORK"/dist/*.whl)
"$WORK/tools/bin/python" -m zipfile -e "$wheel" "$WORK/unpacked"
for file in py.typed _native.pyi examples/quickstart.py; do
  [ -e "$WORK/unpacked/shmsync/$file" ] || { echo "the wheel lacks shmsync/$file"; exit 1; }
done
if grep -qa SHMSYNC_FAILPOINT "$WORK"/unpacked/shmsync/_native*.so; then echo "the wheel has failpoints"; exit 1; fi
"$WORK/tools/bin/auditwheel" show "$wheel"
stable=$wheel
case "$wheel" in *-abi3-*) ;; *)
  echo "== wheel for the stable ABI, which Python has from 3.12 on"
  rm -rf "$WORK/stable" "$WORK/sdist/build"
  for python in python3.1{4,3,2} "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9].*/bin/python3 none; do
    "$python" -c 'import sys, sysconfig, pip
sys.exit(sys.version_info < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' 2>/dev/null && break
  done
  if [ "$python" = none ]; then
    stable= && echo "skipped: there is no Python 3.12 or newer with pip here"
  else
    "$python" -m pip wheel -q --no-deps --wheel-dir "$WORK/stable" "$WORK/sdist"
    stable=$(echo "$WORK"/stable/*-abi3-*.whl)
  fi ;;
esac
[ -z "$stable" ] || "$WORK/tools/bin/abi3audit" --strict "$stable"

echo "== in a clean environment"
"$PYTHON" -m venv "$WORK/clean"
"$WORK/clean/bin/pip" install -q -c constraints.txt "$wheel" numpy pytest pytest-timeout pytest-xdist
cd "$WORK/clean" # where no source folder shadows the package
bin/python -m shmsync doctor
bin/python lib/python3*/site-packages/shmsync/examples/quickstart.py
bin/python -m pytest -q -p no:cacheprovider -c "$ROOT/pyproject.toml" --rootdir "$ROOT" "${TESTS[@]/#/$ROOT/}"
echo "== $(basename "$wheel") is good"
