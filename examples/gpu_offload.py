"""As many layers on the GPU as fit into its memory, found out before loading.

Shows: `backends(devices=True)` lists devices with their memory, `plan_memory` says what a model
will take without loading it, and `load_model` puts layers on a GPU (``n_gpu_layers``) or, where an
engine runs a model on one device as a whole, names the device. Without a GPU it says so and the
model runs on the CPU. Where the memory was taken meanwhile, fewer layers are tried.

Prints devices, plan, what was chosen, and the speed.

    python examples/gpu_offload.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import Any

import infercore as ic
from default_model import default_model

N_CTX = 1024
SPARE = 512 * 2**20  # left free on the GPU: drivers and displays need some


def layers_that_fit(plan: ic.MemoryPlan, n_layer: int, free: int) -> int:
    """Return how many of the layers fit into ``free`` bytes, the output layer counted as one."""
    per_layer = (plan.weights_bytes + plan.kv_bytes) / (n_layer + 1)
    return max(0, min(n_layer + 1, int((free - SPARE - plan.compute_bytes) / per_layer)))


def placements(backend: str, path: str, plan: ic.MemoryPlan) -> list[dict[str, Any]]:
    """Return arguments of `load_model` to be tried in turn; the last one is the CPU's."""
    gpus = [d for d in ic.get_backend(backend).info.devices if d.kind in {"gpu", "igpu"}]
    if not gpus:
        print("no GPU that this engine can use: running on the CPU")
        return [{}]
    free = sum(gpu.memory_free_bytes or gpu.memory_total_bytes or 0 for gpu in gpus)
    if backend != "llamacpp":  # a whole model on one device
        fits = plan.peak_bytes + SPARE < free
        return [*([{"device": gpus[0].name}] if fits else []), {"device": "CPU"}]
    with ic.load_model(path, backend=backend, n_gpu_layers=0) as model:
        n = layers_that_fit(plan, model.info.n_layer, free)
    return [{"n_gpu_layers": layers} for layers in (n, n * 3 // 4, n // 2, n // 4) if layers] + [
        {"n_gpu_layers": 0}
    ]


def main() -> None:
    """List, plan, offload, run."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    for info in ic.backends(devices=True):
        for device in info.devices:
            total = (device.memory_total_bytes or 0) / 2**30
            print(f"{info.name}: {device.name} ({device.kind}, {total:.1f} GiB)")
    plan = ic.plan_memory(path, n_ctx=N_CTX)  # nothing is loaded for this
    print(f"plan: {plan.weights_bytes} B weights, {plan.kv_bytes} B KV, {plan.peak_bytes} B peak")
    usable = [ic.get_backend(info.name) for info in ic.backends() if info.available]
    backend = max(usable, key=lambda one: one.match(path)).name
    for placement in placements(backend, path, plan):
        try:
            with ic.open_session(path, backend=backend, n_ctx=N_CTX, **placement) as session:
                session.ensure_prefix("Once upon a time")
                usage = list(session.decode(max_tokens=64, temperature=0))[-1].usage
        except ic.OutOfMemoryError as error:
            print(f"{placement} does not fit after all: {error}")
            continue
        assert usage is not None  # the last chunk has it
        print(f"{backend} with {placement or 'the CPU'}: {usage.tokens_per_second:.0f} tokens/s")
        return


if __name__ == "__main__":
    main()
