#!/usr/bin/env bash
# README's second command: sets up, builds, and runs all CPU tests.
#   bash test.sh [FOLDER...]   only the tests of these folders (base, gemm, moe, ...)
set -euo pipefail
cd "$(dirname "$0")"

bash setup.sh
cmake --preset cpu >build-configure.log 2>&1 || { cat build-configure.log >&2; exit 1; }
rm -f build-configure.log
cmake --build build/cpu
filter=()
if [ $# -gt 0 ]; then filter=(-R "^($(IFS='|'; echo "$*"))\."); fi
ctest --preset cpu -j "$(nproc)" "${filter[@]}"
