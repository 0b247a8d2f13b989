#!/usr/bin/env bash
# Measures a GPU in eight minutes: bash benchmarks/gpu.sh RECORDS OUT [PARTS]
# RECORDS is a folder of bert_jax.prepare with the 30,522 entries of bert-base-uncased. The parts
# of a group compile in parallel, then each measures alone. A GPU with less than 130 GB
# measures base_128 and large_512 one after the other. Each part writes OUT/PART.log and its
# results below OUT, and does not run again once it has succeeded: give the same command again
# for the other parts. PYTHON names the interpreter, MINUTES the time. SQUAD, a folder with
# squad_v1.1/train-v1.1.json.gz and dev-v1.1.json.gz, adds the part fine_tuning; TEXT, a glob of
# text, adds the part embedding. A trial on a CPU: HEADS=2 BASE=tiny LARGE=tiny ROWS=8 STEPS=1,
# with the parts versions base_128 large_512 / deterministic resume parity.
#
# A machine without a network needs wheels of jax[cuda13], the packages of requirements.txt with
# portpicker, more_itertools, array_record and contextlib2, and for the comparison torch,
# transformers and sentence-transformers.
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
  memory="$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null |
    head -n 1)"
  [ "${memory:-0}" -ge 130000 ] && next=() || next=(/)
  parts=(versions base_128 ${next[@]+"${next[@]}"} large_512 / deterministic resume parity
    ${SQUAD:+fine_tuning} ${TEXT:+embedding} / attention_128 attention_512 launches
    / base_512 large_128)
fi
# Paths of the caller's folder.
SQUAD="${SQUAD:+$(realpath "$SQUAD")}"
case "${TEXT:-}" in '' | /*) ;; *) TEXT="$PWD/$TEXT" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
ends=$((60 * ${MINUTES:-8}))
python() {
  if [ "$((ends - SECONDS))" -lt 30 ]; then
    echo "no time is left: run the same command again"
    return 1
  fi
  timeout "$((ends - SECONDS))" "${PYTHON:-python3}" "$@"
}
# Several processes share the GPU: each takes what it needs.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export BERT_JAX_BENCHMARKS_LOCK="$out/lock"

# Training steps in turns. torch_compile has padded rows, as the users of PyTorch have them, and
# torch_packed has identical ones.
steps() { # SIZE LENGTH ROWS SIDES
  python -m benchmarks.train "--text=$records" "--workdir=$out/$part" --dtype=bfloat16 \
    --rounds=3 "--steps=${STEPS:-10}" --modules "--sizes=$1" "--lengths=$2" \
    "--batch=${ROWS:-$3}" "--sides=$4"
}

measure() { # PART
  local part="$1"
  case "$part" in
    versions) python -m benchmarks.gpu_versions "--output=$out/versions.json" ;;
    base_128) steps "${BASE:-base}" 128 256 torch_compile,torch_packed ;;
    large_512) steps "${LARGE:-large}" 512 32 torch_compile,torch_packed ;;
    base_512) steps "${BASE:-base}" 512 64 torch_compile,torch_packed ;;
    large_128) steps "${LARGE:-large}" 128 128 torch_compile,torch_packed ;;
    deterministic) steps "${BASE:-base}" 128 256 deterministic,deterministic_cublas ;;
    attention_128) steps "${BASE:-base}" 128 256 xla,scan ;;
    attention_512) steps "${LARGE:-large}" 512 32 xla,cudnn,triton ;;
    fine_tuning)
      models bert_base && python -m benchmarks.finetune --tasks=squad_384 "--data=$SQUAD" \
        "--model=$out/random/bert_base" "--workdir=$out/$part" --steps=40 --batch_size=32 ;;
    embedding)
      models minilm && python -m benchmarks.inference "--model=$out/random/minilm" \
        "--text=$TEXT" --short=100000 --long=0 --rounds=2 --batch={128,512,2048} ;;
    launches) python -m benchmarks.gpu_launches "--output=$out/launches.json" \
      "--rows=${ROWS:-0}" ;;
    parity) python -m benchmarks.gpu_parity --layers=2 "--heads=${HEADS:-12}" "--output=$out/parity.json" ;;
    resume) python -m benchmarks.gpu_resume "--records=$records" "--workdir=$out/runs" \
      "--output=$out/resume.json" ;;
    *)
      echo "benchmarks/gpu.sh has no part $part"
      return 2 ;;
  esac
}

models() { # NAME: random models of published sizes; only their speed counts
  [ -e "$out/random/$1/config.json" ] || python -m benchmarks.random_models \
    "--vocab=$records/tokenizer/vocab.txt" "--output=$out/random" "--names=$1"
}

running=() failed=0
# shellcheck disable=SC2329  # the trap calls it
stop() {
  for process in ${running[@]+"${running[@]}"}; do
    pkill -P "$process"
  done
  exit 1
}
trap stop INT TERM

finish() {
  for process in ${running[@]+"${running[@]}"}; do
    wait "$process" || failed=1
  done
  running=()
}

for part in "${parts[@]}"; do
  if [ "$part" = / ]; then
    finish
    continue
  elif [ -e "$out/$part.done" ]; then
    echo "$part: done before"
    continue
  fi
  (
    measure "$part" >"$out/$part.log" 2>&1 && touch "$out/$part.done"
    code=$?
    [ "$code" = 0 ] || echo "$part: failed"
    echo "== $part, after $SECONDS s"
    grep '^|\|^{' "$out/$part.log" || tail -n 3 "$out/$part.log"
    exit "$code"
  ) &
  running+=($!)
done
finish
exit "$failed"
