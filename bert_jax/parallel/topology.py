"""What the chips can do: published peaks, by the name JAX gives them."""

import jax

# Dense bf16 FLOP/s of one device as JAX sees it. TPU: cloud.google.com/tpu/docs (per chip);
# GPU: NVIDIA's data sheets without sparsity.
_PEAK_FLOPS = {
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'NVIDIA A100': 312e12,
    'NVIDIA H100': 989e12,
    'NVIDIA H200': 989e12,
}


def peak_flops(device: jax.Device) -> float | None:
  """Peak bf16 FLOP/s of a device, None where it is not known (a CPU, say)."""
  kind = device.device_kind
  if kind in _PEAK_FLOPS:
    return _PEAK_FLOPS[kind]
  # GPUs add their memory and form: 'NVIDIA H100 80GB HBM3'.
  return next((peak for name, peak in _PEAK_FLOPS.items()
               if name.startswith('NVIDIA') and kind.startswith(name)), None)
