"""Memory and time of creating, loading and saving a large model.

    python benchmarks/weights.py memory
    python benchmarks/weights.py save

`memory` creates and loads a model of 2 GiB that is sharded over eight virtual
devices, with plain Keras and with this package, each in a process of its own:
the most that a device held in arrays, and the most that the process held beyond
arrays on devices and what it began with; to that belongs what virtual devices
work in.

`save` saves it from four processes of two devices, by the way of
`kmd.callbacks.Checkpoint` and by Orbax used directly, in turn, and asks for how
long an asynchronous save keeps training waiting. The exit status is 1 if a
target is missed.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import weights
from keras_meshdist.cluster import Cluster, use_virtual_devices

WHAT = ("create", "create, then load", "load alone")
MIB = 2**20


def build(gib):
    import keras

    # Eight kernels, each of an eighth of the model.
    width = int((gib * 2**30 / 8 / 4) ** 0.5)
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((width,))]
        + [keras.layers.Dense(width, use_bias=False) for _ in range(8)],
        name="large",
    )


def distribution(kinds):
    import keras_meshdist as kmd

    mesh = kmd.make_mesh({"batch": 1, "model": 8})
    layout_map = kinds.LayoutMap(mesh)
    layout_map[".*dense.*kernel"] = (None, "model")
    return kinds.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


class Watched(threading.Thread):
    """Looks at the memory again and again."""

    def __init__(self):
        super().__init__(daemon=True)
        self.on_device = self.on_host = 0
        self._ends = threading.Event()
        self._start = self.resident()

    @staticmethod
    def resident():
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096

    def look(self):
        import jax

        before = self.resident()
        sizes = dict.fromkeys(jax.devices(), 0)
        seen = set()  # arrays may be made of others
        for array in jax.live_arrays():
            try:
                for shard in array.addressable_shards:
                    data = shard.data
                    place = data.unsafe_buffer_pointer()
                    if place not in seen:
                        seen.add(place)
                        sizes[shard.device] += data.nbytes
            except RuntimeError:  # deleted in between
                continue
        # Arrays may have come while others were looked at.
        held = min(before, self.resident()) - self._start - sum(sizes.values())
        self.on_device = max(self.on_device, *sizes.values())
        self.on_host = max(self.on_host, held)

    def run(self):
        while not self._ends.wait(0.002):
            self.look()

    def end(self):
        self._ends.set()
        self.join()


def measure(what, ours, path, gib):
    """Prints the most on a device, the most on the host, and seconds."""
    use_virtual_devices(8)
    import contextlib

    import jax
    import keras

    import keras_meshdist as kmd

    if not ours:
        kmd.keras_hooks.remove()
    keras.distribution.set_distribution(
        distribution(kmd if ours else keras.distribution)
    )
    # What is imported and allocated once, whatever the model.
    with tempfile.TemporaryDirectory() as folder:
        small = build(2**-15)
        small.save_weights(f"{folder}/small.weights.h5")
        small.load_weights(f"{folder}/small.weights.h5")
    sys.setswitchinterval(0.0005)
    watched = Watched()
    watched.start()
    began = time.perf_counter()
    alone = what == "load alone" and ours
    with kmd.skip_initializers() if alone else contextlib.nullcontext():
        model = build(gib)
        if what != "create":
            model.load_weights(path)
    jax.block_until_ready([v.value for v in model.variables])
    seconds = time.perf_counter() - began
    watched.end()
    print(json.dumps([watched.on_device, watched.on_host, seconds]))


def memory(gib, folder):
    """Returns whether the targets are met."""
    largest = gib * 2**30 / 8
    limits = (gib * 2**30 / 8 + largest / 8, 1.5 * largest)
    print(
        f"a model of {gib:g} GiB, 8 devices: at most "
        f"{limits[0] / MIB:.0f} MiB on a device and {limits[1] / MIB:.0f} MiB "
        "on the host"
    )
    print(f"{'':28}{'device, MiB':>12}{'host, MiB':>12}{'seconds':>10}")
    path = str(pathlib.Path(folder) / "large.weights.h5")
    code = "from benchmarks import weights; weights.write({}, {!r})"
    run(code.format(gib, path))
    met = True
    for what in WHAT:
        for ours in (False, True):
            if what == "load alone" and not ours:
                continue
            code = "from benchmarks import weights; weights.measure{}"
            given = (what, ours, path, gib)
            device, host, seconds = json.loads(run(code.format(given)))
            name = f"{what}, {'ours' if ours else 'Keras'}"
            verdict = ""
            if ours:
                # Seeds are arrays too.
                good = device <= limits[0] + MIB and host <= limits[1]
                verdict = "   met" if good else "   MISSED"
                met = met and good
            print(
                f"{name:28}{device / MIB:12.0f}{host / MIB:12.0f}"
                f"{seconds:10.1f}{verdict}",
                flush=True,
            )
    return met


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        # What is freed is given back, so that it doesn't count.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return (done.stdout.splitlines() or [""])[-1]


def write(gib, path):
    use_virtual_devices(8)
    build(gib).save_weights(path)


def saves(gib, folder, turns):
    """Returns seconds of saves: ours, Orbax', and until ours lets go."""
    import jax
    import keras
    import orbax.checkpoint as ocp

    import keras_meshdist as kmd
    from keras_meshdist.checkpoints import together
    from keras_meshdist.checkpoints.keys import variables_of
    from keras_meshdist.checkpoints.store import Store

    dist = distribution(kmd)
    keras.distribution.set_distribution(dist)
    try:
        model = build(gib)
        arrays = {k: v.value for k, v in variables_of(model).items()}
        jax.block_until_ready(arrays)
        direct = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        seconds = {"ours": [], "Orbax": [], "ours lets go": []}
        with Store(f"{folder}/ours", True, create=True) as store:
            for turn in range(turns + 1):
                for who in ("ours", "Orbax")[:: 1 if turn % 2 else -1]:
                    dist.ask(None, "to begin")
                    began = time.perf_counter()
                    if who == "ours":
                        store.save(turn, arrays, {})
                        lets_go = time.perf_counter() - began
                        together.settle(dist, store)
                    else:
                        path = f"{folder}/orbax/{turn}"
                        direct.save(path, args=ocp.args.PyTreeSave(arrays))
                        direct.wait_until_finished()
                    took = time.perf_counter() - began
                    dist.ask(None, "to end")
                    if turn:  # the first one compiles
                        seconds[who].append(took)
                        if who == "ours":
                            seconds["ours lets go"].append(lets_go)
                    remove(folder, turn, who, store)
        direct.close()
        return seconds
    finally:
        keras.distribution.set_distribution(None)


def remove(folder, turn, who, store):
    import shutil

    import jax

    if who == "ours":
        store.delete(turn)
    elif jax.process_index() == 0:
        shutil.rmtree(f"{folder}/orbax/{turn}")


def save(gib, folder, turns):
    """Returns whether the targets are met."""
    with Cluster(4, 2, timeout=3600) as cluster:
        # Sent by name, and not that of the main program.
        measured = cluster.call(weights.saves, gib, folder, turns)
    seconds = {
        name: statistics.median(max(each) for each in zip(*of_all, strict=True))
        for name in measured[0]
        for of_all in [[m[name] for m in measured]]
    }
    met = True
    for what, part, whole, target in (
        ("a save, against Orbax itself", "ours", "Orbax", 1.1),
        ("what an asynchronous one blocks", "ours lets go", "ours", 0.1),
    ):
        ratio = seconds[part] / seconds[whole]
        met = met and ratio <= target
        print(
            f"{what:34}{seconds[part]:9.2f}{seconds[whole]:9.2f}{ratio:8.3f}"
            f"   target {target:.2f}: {'met' if ratio <= target else 'MISSED'}",
            flush=True,
        )
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("memory", "save"))
    parser.add_argument("--gib", type=float, default=2.0, help="model size")
    parser.add_argument("--turns", type=int, default=5, help="saves of each")
    options = parser.parse_args()
    import jax
    import keras
    import numpy as np
    import orbax.checkpoint as ocp

    import keras_meshdist as kmd

    print(
        f"keras_meshdist {kmd.__version__}, Keras {keras.__version__}, JAX "
        f"{jax.__version__}, NumPy {np.__version__}, Orbax {ocp.__version__}, "
        f"Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "memory":
            met = memory(options.gib, folder)
        else:
            print(f"{'seconds':34}{'':>9}{'of':>9}{'ratio':>8}")
            met = save(options.gib, folder, options.turns)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
