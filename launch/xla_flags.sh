# shellcheck shell=bash
# Sourced: xla_flags GENERATION prints the compiler flags for a chip as an environment variable of
# the run. Flags of libtpu go into LIBTPU_INIT_ARGS, because JAX aborts if XLA_FLAGS has one.
xla_flags() {
  case "$1" in
    # libtpu 0.0.50 gathers synchronously only on v4. In two feed-forward blocks of width 1024 under
    # fsdp, all 3 gathers block without this flag, and none with it. The compiler estimates 1.74
    # million cycles instead of 1.77, and 92 MiB of temporaries instead of 57.
    v4) echo 'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true' ;;
    # v5e overlaps gathers by default; no flag for that changes a program on it. A fusion may use 16
    # of the 128 MiB of VMEM by default. With 64, a step of two layers of BERT-large under fsdp (64
    # rows of 128 on 2x2) moves 6.66 GB of memory traffic instead of 6.90. The compiler estimates
    # 10.74 million cycles instead of 10.81, and 0.45 GiB of temporaries instead of 0.41.
    v5e) echo 'LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536' ;;
    # On v6e more VMEM saves nothing: 0.794 GB with it, 0.788 without (one layer of width 512).
    v5p | v6e | tpu7x) echo 'LIBTPU_INIT_ARGS=' ;;
    # The scheduler overlaps NCCL with matrix products.
    gpu) echo 'XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true' ;;
    *) echo "bert_jax: unknown chip $1: use v4, v5e, v5p, v6e, tpu7x, gpu" >&2; return 2 ;;
  esac
}
