#!/usr/bin/env bash
# Measures a GPU in eight minutes: bash benchmarks/gpu.sh RECORDS OUT [PARTS]
# RECORDS is a folder of bert_jax.prepare with the 30,522 entries of bert-base-uncased. Each part
# writes OUT/PART.json, or OUT/PART/train.jsonl, and does not run again once it has: give the same
# command again for the other parts. A part that fails is named, and the others run. The part
# steps compiles all models in parallel and then times and profiles each. PYTHON names the
# interpreter, MINUTES the time. A trial on a CPU: LAYERS=2 BASE=tiny LARGE=tiny ROWS=8 STEPS=1.
#
# A machine without a network needs wheels of jax[cuda13], the packages of requirements.txt with
# portpicker, more_itertools, array_record and contextlib2, and for the comparison torch and
# transformers.
set -uo pipefail
if [ $# -lt 2 ]; then
  echo "give both RECORDS and OUT: bash benchmarks/gpu.sh records/wiki runs/gpu" >&2
  exit 2
fi
records="$(realpath "$1")"
mkdir -p "$2"
out="$(realpath "$2")"
parts=("${@:3}")
if [ $# = 2 ]; then
  parts=(versions steps resume parity base_128 large_512 large_128 base_512 no_attention_dropout
    deterministic)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# Several processes share the GPU: each takes what it needs.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$out/compiled}"
base="${BASE:-base}" large="${LARGE:-large}"

failed=0
for part in "${parts[@]}"; do
  left=$((60 * ${MINUTES:-8} - SECONDS))
  # In turns with PyTorch, compiled: padded rows as its users have them, and identical ones.
  steps=(benchmarks.train "--text=$records" "--workdir=$out/$part" --dtype=bfloat16 --rounds=3
    "--steps=${STEPS:-10}" "--sides=torch_compile,torch_packed")
  flags="${XLA_FLAGS:-}"
  case "$part" in
    versions) command=(benchmarks.gpu_versions "--output=$out/versions.json") ;;
    steps) command=(benchmarks.gpu_steps "--records=$records" "--out=$out/steps"
      "--layers=${LAYERS:-0}" "--rows=${ROWS:-0}" "--steps=${STEPS:-20}") ;;
    resume) command=(benchmarks.gpu_resume "--records=$records" "--workdir=$out/runs"
      "--output=$out/resume.json") ;;
    parity) command=(benchmarks.gpu_parity "--layers=${LAYERS:-12}" "--heads=${LAYERS:-12}"
      "--output=$out/parity.json") ;;
    base_128) command=("${steps[@]}" "--sizes=$base" --lengths=128 "--batch=${ROWS:-256}") ;;
    base_512) command=("${steps[@]}" "--sizes=$base" --lengths=512 "--batch=${ROWS:-64}") ;;
    large_128) command=("${steps[@]}" "--sizes=$large" --lengths=128 "--batch=${ROWS:-128}") ;;
    large_512) command=("${steps[@]}" "--sizes=$large" --lengths=512 "--batch=${ROWS:-32}") ;;
    no_attention_dropout) # which cuDNN's attention asks for
      command=("${steps[@]}" "--sizes=$large" --lengths=512 "--batch=${ROWS:-32}"
        --attention_dropout=0) ;;
    deterministic) # the price of sums in a fixed order
      command=("${steps[@]}" "--sizes=$base" --lengths=128 "--batch=${ROWS:-256}" --sides=)
      flags+=' --xla_gpu_deterministic_ops=true' ;;
    *)
      echo "$part is no part: benchmarks/gpu.sh lists them" >&2
      exit 2 ;;
  esac
  if [ "$part" != steps ] && [ -e "$out/$part.json" ] || [ -e "$out/$part/train.jsonl" ]; then
    echo "$part: done before"
  elif [ "$left" -lt 30 ]; then
    echo "$part: no time is left, run the same command again"
    failed=1
  else
    echo "== $part, $left s left"
    if ! XLA_FLAGS="$flags" timeout "$left" "${PYTHON:-python3}" -m "${command[@]}"; then
      echo "$part: failed"
      failed=1
    fi
  fi
done
exit "$failed"
