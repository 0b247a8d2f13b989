# shellcheck shell=bash
# Sourced: xla_flags GENERATION prints the compiler flags for a chip, to be put into the environment
# of the run. Flags of libtpu go into LIBTPU_INIT_ARGS: XLA_FLAGS with one of them aborts.
xla_flags() {
  case "$1" in
    # libtpu 0.0.50 gathers synchronously on v4 alone. Of two feed-forward blocks of 1024 under fsdp
    # all 3 gathers wait without this flag and none with it: 1.74 million cycles by the compiler's
    # estimate and not 1.77, for 92 MiB of temporaries and not 57.
    v4) echo 'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true' ;;
    # It overlaps by itself: no flag for that changes a program on these. A fusion may use 16 of the
    # 128 MiB of VMEM by default. With 64 a step of two layers of BERT-large under fsdp (64 rows of
    # 128 on 2x2) moves 6.66 GB of memory traffic and not 6.90, takes 10.74 million cycles by the
    # compiler's estimate and not 10.81, and holds 0.45 GiB of temporaries and not 0.41.
    v5e) echo 'LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536' ;;
    # On v6e more VMEM saves nothing: 0.794 GB and 0.788 without it (one layer 512 wide).
    v5p | v6e | tpu7x) echo 'LIBTPU_INIT_ARGS=' ;;
    # The scheduler hides NCCL behind the products.
    gpu) echo 'XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true' ;;
    *) echo "bert_jax: unknown chip $1: there are v4, v5e, v5p, v6e, tpu7x, gpu" >&2; return 2 ;;
  esac
}
