#!/usr/bin/env bash
# Makes the Python environment of the benchmarks' peers (PyTorch, NumPy) in ~/.cache/moiety, outside
# the clone, and prints its python. Takes a moment when it is already there.
#   bash bench/setup_peers.sh
set -euo pipefail

case "${1:-}" in
  "") ;;
  help | --help | -h) sed -n '2,4s/^# \?//p' "$0"; exit 0 ;;
  *) echo "setup_peers: unknown argument '$1' (--help)" >&2; exit 2 ;;
esac

torch_version=2.13.0
venv=${XDG_CACHE_HOME:-$HOME/.cache}/moiety/torch-venv
python=$venv/bin/python

has_torch() {
  [ -x "$python" ] && "$python" -c "
import sys, importlib.metadata as m
sys.exit(m.version('torch').split('+')[0] != '$torch_version')" 2>/dev/null
}

if ! has_torch; then
  echo "setup_peers: installing torch $torch_version into $venv" >&2
  # Debian keeps what `venv` would install pip with in a package of its own.
  if ! python3 -m pip --version >/dev/null 2>&1; then
    echo "setup_peers: Python has no pip (Debian: python3-pip; bash setup.sh --gpu installs it)" >&2
    exit 1
  fi
  python3 -m venv --without-pip "$venv"
  python3 -m pip --python "$python" install --quiet "torch==$torch_version" numpy >&2
fi
echo "$python"
