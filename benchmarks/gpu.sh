#!/usr/bin/env bash
# All that is worth knowing about a GPU, in nine minutes: bash benchmarks/gpu.sh RECORDS OUT [PARTS]
# RECORDS is a folder of bert_jax.prepare with the 30,522 entries of bert-base-uncased. Each part
# writes OUT/PART.json, or OUT/PART/train.jsonl, and does not run again once it has: the same
# command goes on. A part that fails is named, and the others go on. PYTHON names the interpreter,
# MINUTES the time. A trial on a CPU: LAYERS=2 BASE=tiny LARGE=tiny ROWS=8 STEPS=1.
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
  parts=(versions resume parity base_128 large_512 large_128 base_512 no_attention_dropout
    deterministic)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# Several processes share the GPU: each takes what it needs.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$out/compiled}"
base="${BASE:-base}" large="${LARGE:-large}"

failed=0
for part in "${parts[@]}"; do
  left=$((60 * ${MINUTES:-9} - SECONDS))
  # In turns with PyTorch, compiled: padded rows as its users have them, and identical ones.
  steps=(benchmarks.train "--text=$records" "--workdir=$out/$part" --dtype=bfloat16 --rounds=3
    "--steps=${STEPS:-10}" "--sides=torch_compile,torch_packed")
  flags="${XLA_FLAGS:-}"
  case "$part" in
    versions) command=(benchmarks.gpu_versions "--output=$out/versions.json") ;;
    resume) command=(benchmarks.gpu_resume "--records=$records" "--workdir=$out/runs"
      "--output=$out/resume.json") ;;
    parity) command=(benchmarks.gpu_parity "--layers=${LAYERS:-12}" "--heads=${LAYERS:-12}"
      "--output=$out/parity.json") ;;
    base_128) command=("${steps[@]}" "--sizes=$base" --lengths=128 "--batch=${ROWS:-256}") ;;
    base_512) command=("${steps[@]}" "--sizes=$base" --lengths=512 "--batch=${ROWS:-64}") ;;
    large_128) command=("${steps[@]}" "--sizes=$large" --lengths=128 "--batch=${ROWS:-128}"
      --scan_unroll=1) ;;
    large_512) command=("${steps[@]}" "--sizes=$large" --lengths=512 "--batch=${ROWS:-32}"
      --scan_unroll=1) ;;
    no_attention_dropout) # which cuDNN's attention asks for
      command=("${steps[@]}" "--sizes=$large" --lengths=512 "--batch=${ROWS:-32}" --scan_unroll=1
        --attention_dropout=0) ;;
    deterministic) # the price of sums in a fixed order
      command=("${steps[@]}" "--sizes=$base" --lengths=128 "--batch=${ROWS:-256}" --sides=)
      flags+=' --xla_gpu_deterministic_ops=true' ;;
    *)
      echo "$part is no part: benchmarks/gpu.sh lists them" >&2
      exit 2 ;;
  esac
  if [ -e "$out/$part.json" ] || [ -e "$out/$part/train.jsonl" ]; then
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
