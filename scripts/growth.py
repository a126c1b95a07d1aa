"""Measures how the time to trace, lower and compile a step grows with depth and with devices.

    python scripts/growth.py | tee scripts/results/growth.txt

Each measurement is a process of its own, without a compilation cache, of a tiny decoder. Nothing is
allocated or run.
"""

import argparse
import json
import os
import subprocess
import sys
import time

DEPTHS = (4, 16, 64, 128)
DEVICES = (8, 64, 512)


def measure(layers: int, devices: int) -> dict[str, float]:
    """Returns the seconds of each stage."""
    import jax

    import jaxtp
    from jaxtp.train import optimizer
    from jaxtp.train.config import DataConfig, TrainConfig
    from jaxtp.train.setup import plan_step
    from jaxtp.train.state import plan_state

    tiny = {
        "vocab_size": 256,
        "d_model": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "d_ff": 64,
    }
    model = jaxtp.ModelConfig(num_layers=layers, **tiny)
    data = DataConfig(sequence_length=32, global_batch_size=devices)
    config = TrainConfig(model=model, data=data)
    mesh = jaxtp.make_mesh(dp=devices // 8, fsdp=2, tp=4)
    jax.block_until_ready(jax.numpy.ones(()) + 1)
    times = {}

    def note(name: str, action):
        started = time.perf_counter()
        done = action()
        times[name] = time.perf_counter() - started
        return done

    note("plan", lambda: plan_state(model, optimizer.build(config.optimizer, 10), mesh))
    traced = note("trace", lambda: plan_step(config).trace_on(mesh))
    lowered = note("lower", traced.lower)
    note("compile", lowered.compile)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=300, help="limit of a measurement (default 300)"
    )
    parser.add_argument("--measure", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the beginning")
    print(
        f"{'layers':>6}{'devices':>9}{'plan':>9}{'trace':>9}{'lower':>9}{'compile':>9}{'all':>9} "
        " seconds"
    )
    for layers, devices in [
        *((depth, 8) for depth in DEPTHS),
        *((4, devices) for devices in DEVICES[1:]),
    ]:
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, __file__, "--measure", str(layers), str(devices)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                timeout=arguments.seconds,
            )
        except subprocess.TimeoutExpired:
            print(f"{layers:6}{devices:9}  more than {arguments.seconds:g} s", flush=True)
            continue
        times = json.loads(done.stdout.splitlines()[-1])
        row = "".join(f"{value:9.2f}" for value in (*times.values(), sum(times.values())))
        print(f"{layers:6}{devices:9}{row}", flush=True)


if __name__ == "__main__":
    main()
