# shellcheck shell=bash
# Sourced: xla_flags GENERATION prints the compiler flags for a chip, to be put into the environment
# of the run. Flags of libtpu go into LIBTPU_INIT_ARGS: XLA_FLAGS with one of them aborts.
xla_flags() {
  case "$1" in
    # libtpu 0.0.50 gathers synchronously on v4 alone: of two feed-forward blocks of 1024 under fsdp
    # all 3 large gathers wait without it and none with it (1.77 and 1.74 million cycles).
    v4) echo 'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true' ;;
    # libtpu overlaps by itself: its flags for that leave the program of a step as it is.
    v5e | v5p | v6e | tpu7x) echo 'LIBTPU_INIT_ARGS=' ;;
    # The scheduler hides NCCL behind the products.
    gpu) echo 'XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true' ;;
    *) echo "bert_jax: unknown chip $1: there are v4, v5e, v5p, v6e, tpu7x, gpu" >&2; return 2 ;;
  esac
}
