#!/usr/bin/env bash
# README's first command: sets up, builds, prepares English text, trains a small mixture-of-experts
# model on two ranks, on GPUs if there are two, or on the one GPU that there is, into runs/demo, and
# shows what it has learned.
# Run again, it continues or, when the run is complete, goes straight to the results.
#   bash demo.sh [--section.key=value ...]   further options go to `moiety train`
set -euo pipefail
cd "$(dirname "$0")"
say() { printf '\n== %s\n' "$*" >&2; }

preset=cpu setup=(--corpus) ranks=() time="two to three minutes on two cores"
if nvidia-smi -L >/dev/null 2>&1; then
  preset=gpu setup+=(--gpu) time="seconds on a GPU"
  if [ "$(nvidia-smi -L | wc -l)" -eq 1 ]; then
    ranks=(--ranks 1 --parallel.ep=1 --train.micro_batch=8)  # the same batch, on one rank
  fi
fi

say "setting up"
bash setup.sh "${setup[@]}"

say "building"
cmake --preset $preset >build-configure.log 2>&1 || { cat build-configure.log >&2; exit 1; }
rm -f build-configure.log
cmake --build build/$preset --target installable
moiety=build/$preset/bin/moiety

data=runs/demo-data
if [ ! -f $data/demo.valid.tok ]; then
  say "collecting and preparing text"
  bash tools/demo_corpus.sh $data/text
  $moiety prepare $data/text --tokenizer bytes --valid-fraction 0.02 --out $data/demo
fi

say "training ($time)"
$moiety train --config configs/demo.toml --run runs/demo "${ranks[@]}" \
  --data.train="['$data/demo.train.tok']" --data.valid="['$data/demo.valid.tok']" "$@"

say "validation"
$moiety eval runs/demo --data $data/demo.valid.tok --samples 320

say "a sample"
$moiety generate runs/demo --prompt "The " --tokens 250 --temperature 0.6 --seed 3
echo

cat >&2 <<END

What to try next
  $moiety generate runs/demo --prompt "A hacker is" --tokens 300 --temperature 0.8
  $moiety train --config configs/demo.toml --run runs/longer --train.steps=3000 ${ranks[@]} \\
      --data.train="['$data/demo.train.tok']" --data.valid="['$data/demo.valid.tok']"
  $moiety train --help        every option, its default and its range
  cmake --install build/$preset --prefix ~/.local   program, library, completion, manual
  runs/demo/plots/loss.svg    the curve, in any browser; docs/getting-started.md goes on from here
END
