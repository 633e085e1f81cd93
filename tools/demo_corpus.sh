#!/usr/bin/env bash
# The demo's corpus: demo_corpus.sh OUTDIR [--gcide]. See demo_corpus.py.
exec python3 "$(dirname "$0")/demo_corpus.py" "$@"
