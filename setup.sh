#!/usr/bin/env bash
# Installs the Debian packages that Moiety builds with, those that are missing. Takes a second when
# none is.
#   bash setup.sh           compiler, libraries, tools
#   bash setup.sh --corpus  also the packages that hold the demo's English text
set -euo pipefail

packages=(g++ cmake ninja-build ccache git python3 clang-format
  libfmt-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev zlib1g-dev
  libdnnl-dev libopenmpi-dev openmpi-bin libgtest-dev libbenchmark-dev)
for argument in "$@"; do
  case "$argument" in
    --corpus) packages+=(fortunes dict-jargon) ;;
    --help | -h) sed -n '2,5s/^# \?//p' "$0"; exit 0 ;;
    *) echo "setup.sh: unknown argument '$argument' (known: --corpus)" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  case "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)" in
    *"install ok installed") ;;
    *) missing+=("$package") ;;
  esac
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

if ! command -v apt-get >/dev/null; then
  echo "setup.sh: this is not a Debian-like system; please install the counterparts of:" \
    "${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "setup.sh: not root, and no sudo; as root run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup.sh: installing ${missing[*]}" >&2
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update -qq &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "setup.sh: apt-get failed; its whole output is in $log" >&2
  exit 1
fi
rm -f "$log"
