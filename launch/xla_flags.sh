# shellcheck shell=bash
# Sourced: xla_flags GENERATION prints the compiler flags for a chip, to be put into the environment
# of the run. Flags of libtpu go into LIBTPU_INIT_ARGS: XLA_FLAGS with one of them aborts.
xla_flags() {
  # Gradients are summed and parameters gathered while the chip computes; without these the step
  # waits for each of them.
  local overlap='--xla_tpu_enable_async_collective_fusion=true'
  overlap+=' --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true'
  overlap+=' --xla_tpu_enable_async_collective_fusion_multiple_steps=true'
  overlap+=' --xla_tpu_overlap_compute_collective_tc=true'
  overlap+=' --xla_enable_async_all_gather=true'
  case "$1" in
    v4 | v5p) echo "LIBTPU_INIT_ARGS=$overlap" ;;
    # 128 MiB of VMEM, of which a fusion may use only 16 by default: larger tiles, less HBM traffic.
    v5e | v6e) echo "LIBTPU_INIT_ARGS=$overlap --xla_tpu_scoped_vmem_limit_kib=65536" ;;
    tpu7x) echo "LIBTPU_INIT_ARGS=$overlap" ;;
    # The scheduler hides NCCL behind the products.
    gpu) echo 'XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true' ;;
    *) echo "bert_jax: unknown chip $1: there are v4, v5e, v5p, v6e, tpu7x, gpu" >&2; return 2 ;;
  esac
}
