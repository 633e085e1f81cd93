#!/usr/bin/env bash
# Makes the Python environment of the benchmark's peers, outside the clone, and prints its python.
# Takes a moment when it is already there.
set -euo pipefail

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
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "torch==$torch_version" numpy >&2
fi
echo "$python"
