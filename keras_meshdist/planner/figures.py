"""All that is to be known of one mesh, as plain numbers."""

import dataclasses
import math
import os
import traceback
import warnings

import keras
import numpy as np

from keras_meshdist import cluster
from keras_meshdist.abstract import variables_of
from keras_meshdist.mesh import jax_mesh, make_mesh, process_ids
from keras_meshdist.pieces import axes_of
from keras_meshdist.planner import schedule
from keras_meshdist.planner.blocks import Cut
from keras_meshdist.planner.collectives import collectives_of, summed
from keras_meshdist.planner.compilation import (
    OutOfMemoryError,
    RefusedError,
    compiled,
)
from keras_meshdist.planner.example import rows_of
from keras_meshdist.planner.network import Network
from keras_meshdist.planner.padding import argument_bytes
from keras_meshdist.planner.products import flops_of_loops
from keras_meshdist.planner.program import parse
from keras_meshdist.planner.remat import remat_blocks
from keras_meshdist.planner.step import AbstractStep, distribute
from keras_meshdist.planner.topologies import Topology

LORA_RANK = 8
# Variables that are named where a program is too large.
_LISTED = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """One mesh to be looked at.

    Args:
        build: what has `load()` and gives the function that builds the model.
        topology: `Topology`.
        axes: tuple of pairs of str and int, the mesh in order.
        batch: int, or shapes.
        seq: int or `None`.
        layout: `"auto"`, `"fsdp"`, or what has `load()`.
        dtype: str, a dtype policy, or `None` for what the caller has.
        kind: str, `"train"`, `"test"` or `"predict"`.
        changes: tuple of str, what else is done to the model: `"remat"`, to
            rematerialize its blocks, `"lora"`, to train low-rank additions to
            the weights of its backbone only, and `"sequence"`, to split the
            sequence over the model axis.
        units: int, of the model's repeated blocks those that are kept; `None`
            for the whole model.
    """

    build: object
    topology: Topology
    axes: tuple[tuple[str, int], ...]
    batch: object
    seq: int | None = None
    layout: object = "auto"
    dtype: str | None = None
    kind: str = "train"
    changes: tuple[str, ...] = ()
    units: int | None = None

    def answer(self):
        """Returns the figures; a process of the planner's own calls this."""
        return figures(self)

    def environment(self):
        """The environment of a process that compiles for the topology."""
        env = {
            **os.environ,
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            # Nobody's chips are used, so several processes may load libtpu.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if self.topology.is_virtual:
            env.update(cluster.environment(self.topology.num_devices, env))
        return env


def figures(job):
    """Compiles a step for one mesh, and counts.

    Args:
        job: `Job`.

    Returns:
        Dict of what `json` takes; `error` is a message, or `None`. With an
        error of which the user should know the place, `traceback` has it.
    """
    cut = Cut(job.units)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = _figures(job, cut)
        found["notes"] += sorted(
            {str(w.message) for w in said if "layout rule" in str(w.message)}
        )
        return found
    except RefusedError as error:
        text, place = str(error), None
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, ValueError | RuntimeError):
            text = f"{type(error).__name__}: {text}"
        place = traceback.format_exc()
    return {
        "axes": job.axes,
        "error": text,
        "traceback": place,
        "units": cut.units,
    }


def _figures(job, cut):
    if job.dtype is not None:
        keras.config.set_dtype_policy(job.dtype)
    devices = job.topology.devices()
    mesh = make_mesh(dict(job.axes), devices)
    build = job.build.load()

    layout = job.layout
    layout = layout.load() if hasattr(layout, "load") else layout
    sequence = "model" if "sequence" in job.changes else None
    distributions = []

    def change(model):
        if "lora" in job.changes:
            model.backbone.enable_lora(LORA_RANK)
        if "remat" in job.changes:
            remat_blocks(model)
        # Of the whole model: a shallow one may get other layouts.
        distributions.append(distribute(model, mesh, layout, sequence))
        cut(model)

    step = AbstractStep(build, job.batch, job.seq, job.kind, change)
    (distribution,) = distributions
    # A layout function may have one of its own.
    mesh = distribution.device_mesh
    lowered = step.lower(distribution)
    names = [v.path for v in variables_of(step.model)]
    try:
        found, is_new = compiled(lowered, job.topology, mesh, names)
    except OutOfMemoryError as error:
        gib = 2**30
        largest = ", ".join(
            f"{path} {size / gib:.2f} GiB"
            for path, size in _largest(variables_of(step.model))
        )
        raise RefusedError(
            "out of memory at compile time, on a chip which has "
            f"{job.topology.chip.hbm_bytes / gib:.2f} GiB; the largest "
            f"variables: {largest}; the compiler says: {error}"
        ) from error
    program = parse(found["text"])
    collectives = collectives_of(program, mesh.axis_names, mesh.shape)
    coords = [_coords(device) for device in mesh.devices.flat]
    slices = [getattr(d, "slice_index", 0) for d in mesh.devices.flat]
    network = Network(job.topology.chip, job.topology.grid, coords, slices)
    flops = int(found["cost"]["flops"]) + flops_of_loops(program)
    rows, tokens = rows_of(step.data)
    hosts = process_ids(jax_mesh(mesh))
    result = {
        "axes": [
            [name, int(size)]
            for name, size in zip(mesh.axis_names, mesh.shape, strict=True)
        ],
        "bytes": _bytes(step, found["memory"], program),
        "flops": flops,
        "collectives": summed(collectives, cut.blocks),
        "units": cut.units,
        "feeds": {
            str(host): [int(row) for row in distribution.feed_rows(rows, host)]
            for host in sorted({int(host) for host in hosts.flat})
        },
        "coords": coords,
        "hosts": [int(host) for host in hosts.flat],
        "slices": slices,
        "rings": _rings(network, mesh),
        "rows": rows,
        "tokens": tokens,
        "notes": _unused_axes(step.model, distribution)
        + schedule.what_is_unknown(program),
        "largest": _largest(variables_of(step.model)),
        "too_large": found["too_large"],
        "blocks": bool(cut.blocks),
        "dtype_policy": keras.config.dtype_policy().name,
        "has_backbone": hasattr(
            getattr(step.model, "backbone", None), "enable_lora"
        ),
        "error": None,
        "compiled": is_new,
    }
    seconds = {c.name: network.exchange(c).seconds for c in collectives}
    spent = schedule.Walk(program, job.topology.chip.clock, seconds).step()
    hbm = found["cost"]["bytes"]
    result.update(_times(job.topology.chip, spent, flops, hbm))
    return result


def _unused_axes(model, distribution):
    """Notes on axes over which neither rows nor weights are split."""
    used = {
        *axes_of(distribution.batch_dim_name),
        *axes_of(getattr(distribution, "sequence_dim_name", None)),
    }
    for variable in variables_of(model):
        for entry in variable.value.sharding.spec:
            used |= set(axes_of(entry))
    mesh = distribution.device_mesh
    return [
        f"neither rows nor weights are split over the axis {name!r}: its "
        f"{size} chips do the same"
        for name, size in zip(mesh.axis_names, mesh.shape, strict=True)
        if size > 1 and name not in used
    ]


def _coords(device):
    return [int(c) for c in getattr(device, "coords", (device.id,))]


def _bytes(step, memory, program):
    """Bytes on a chip, by the compiler, and counted from shapes."""
    model = step.model
    optimizer = getattr(model, "optimizer", None)
    unpadded, padded = argument_bytes(program)
    sizes = {
        "arguments_unpadded": unpadded,
        "arguments_padding": padded - unpadded,
        "weights": _shards(model.weights),
        "optimizer": _shards(optimizer.variables if optimizer else ()),
        "gradients": _shards(model.trainable_variables),
    }
    peak = (
        memory["arguments"]
        + memory["outputs"]
        - memory["alias"]
        + memory["temporaries"]
        + memory["code"]
    )
    return {**memory, "peak": peak, **sizes}


def _shards(variables):
    return sum(map(_shard, variables))


def _shard(variable):
    value = variable.value
    shape = value.sharding.shard_shape(value.shape)
    return math.prod(shape) * value.dtype.itemsize


def _largest(variables):
    """The variables that take the most on a device, with their bytes."""
    order = sorted(variables, key=_shard, reverse=True)[:_LISTED]
    return [[variable.path, _shard(variable)] for variable in order]


def _times(chip, spent, flops, hbm_bytes):
    """The estimate, and of what it consists, in seconds."""
    hbm = hbm_bytes / chip.hbm_bandwidth
    peak = flops / chip.peak_flops
    if not spent.compute:
        # A compiler that estimates no cycles.
        spent = dataclasses.replace(spent, compute=max(hbm, peak))
    return {
        "step_seconds": spent.total,
        "parts": {
            "compute": spent.compute,
            "exposed_collectives": spent.exposed,
            "hidden_collectives": max(0.0, spent.exchange - spent.exposed),
            "hbm_traffic": hbm,
            "at_peak_flops": peak,
        },
    }


def _rings(network, mesh):
    """How the devices along each mesh axis lie in the grid of chips."""
    places = np.arange(mesh.devices.size).reshape(mesh.shape)
    found = {}
    for number, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(places, number, -1).reshape(-1, mesh.shape[number])
        groups = tuple(tuple(int(p) for p in line) for line in lines)
        found[name] = dataclasses.asdict(network.ring(groups))
    return found
