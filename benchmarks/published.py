"""Published training results, beside what a plan estimates for them.

    python benchmarks/published.py [NAME...]

Each is planned with the model's geometry, mesh, batch and dtypes as published,
and a table of published and estimated times of a step is printed, as it stands
in docs/planning.md. It takes KerasHub and libtpu, and minutes for each; what
was compiled once is taken from the cache of plans.
"""

import argparse
import dataclasses
import functools

import keras

import keras_meshdist as kmd

_MAXTEXT = (
    "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs"
)
_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium"
_KERAS = "https://github.com/keras-team/keras/pull/20674"


@dataclasses.dataclass(frozen=True)
class Case:
    """A published result.

    Args:
        name: str.
        source: str, its address.
        build: function that returns a compiled model.
        topology: str.
        mesh: dict from axis to size.
        batch: int, global rows.
        seq: int, their length.
        seconds: float, of a published step.
        layout: as `kmd.plan` takes it. Defaults to `"auto"`.
        remat: bool, whether blocks are rematerialized. Defaults to `True`.
        dtype: str. Defaults to weights in float32 and products in bfloat16.
    """

    name: str
    source: str
    build: object
    topology: str
    mesh: dict
    batch: int
    seq: int
    seconds: float
    layout: object = "auto"
    remat: bool = True
    dtype: str = "mixed_bfloat16"


def compiled(task):
    task.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return task


def gemma(lora=None, **config):
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(**config)
    if lora:
        backbone.enable_lora(lora)
    return compiled(
        keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    )


def llama(**config):
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(**config)
    return compiled(
        keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    )


def gpt(**config):
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(dropout=0.0, **config)
    return compiled(
        keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    )


def scaled(scale):
    """Geometry of MaxText's models of so many billions of parameters.

    Its heads are larger than the hidden size allows in KerasHub's Llama;
    KerasHub's Gemma has the same products. Its table of tokens serves twice.
    """
    emb, heads, layers = {
        16: (4096, 64, 32),
        32: (8192, 64, 32),
        64: (8192, 64, 64),
        128: (8192, 128, 64),
    }[scale]
    return {
        "vocabulary_size": 32000,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": heads,
        "hidden_dim": emb,
        # Both halves: what is gated, and the gate.
        "intermediate_dim": 2 * 7168 * heads // 16,
        "head_dim": 128,
    }


def seconds_of(scale, tflops, rows, seq=2048):
    """A step's time, of operations a second as MaxText counts them.

    Three times those of all products forwards; attention counts in full, as
    it did when these results were published.
    """
    c = scaled(scale)
    emb, wide = c["hidden_dim"], c["num_query_heads"] * c["head_dim"]
    products = 3 * emb * c["intermediate_dim"] // 2 + 4 * emb * wide
    forwards = 2 * products * c["num_layers"] + 2 * emb * c["vocabulary_size"]
    attention = 4 * seq * wide * c["num_layers"]
    return 3 * rows * seq * (forwards + attention) / (tflops * 1e12)


def maxtext(scale, rows, tflops, mesh, topology="v5e-256"):
    chips = 256
    return Case(
        f"MaxText {scale}B",
        f"{_MAXTEXT}/tpu/v5e",
        functools.partial(gemma, **scaled(scale)),
        topology,
        mesh,
        rows * chips,
        2048,
        seconds_of(scale, tflops, rows),
    )


GEMMA_2B = {
    "vocabulary_size": 256000,
    "num_layers": 18,
    "num_query_heads": 8,
    "num_key_value_heads": 1,
    "hidden_dim": 2048,
    "intermediate_dim": 32768,
    "head_dim": 256,
}


def as_numbered(mesh):
    """KerasHub's own rules, and devices in the order of their numbers."""
    import keras_hub

    names, shape = tuple(mesh.axis_names), tuple(mesh.shape)
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    mesh = keras.distribution.DeviceMesh(shape, names, devices)
    rules = keras_hub.models.GemmaBackbone.get_layout_map(mesh)
    return kmd.ModelParallel(layout_map=rules, batch_dim_name="batch")


def keras_case(mesh, seconds):
    order = ", ".join(mesh)
    return Case(
        f"Gemma 2B, LoRA, ({order})",
        _KERAS,
        functools.partial(gemma, lora=4, **GEMMA_2B),
        "v5e-8",
        mesh,
        # The published text doesn't say how many rows of which length.
        8,
        512,
        seconds,
        layout=as_numbered,
        remat=False,
        dtype="bfloat16",
    )


CASES = [
    maxtext(16, 6, 120, {"fsdp": 256}),
    maxtext(32, 4, 132, {"fsdp": 256}),
    maxtext(64, 2, 118, {"fsdp": 256}),
    maxtext(128, 1, 110, {"fsdp": 16, "model": 16}),
    Case(
        "GPT-3 175B",
        f"{_RECIPES}/GPT3-175B-MaxText/bf16",
        functools.partial(
            gpt,
            vocabulary_size=50304,
            num_layers=96,
            num_heads=96,
            hidden_dim=12288,
            intermediate_dim=49152,
            max_sequence_length=2048,
        ),
        "v6e-256",
        {"fsdp": 256},
        768,
        2048,
        17.182,
    ),
    Case(
        "Llama 2 70B",
        f"{_RECIPES}/Llama2-70B-MaxText",
        functools.partial(
            llama,
            vocabulary_size=32000,
            num_layers=80,
            num_query_heads=64,
            num_key_value_heads=8,
            hidden_dim=8192,
            intermediate_dim=28672,
        ),
        "v6e-256",
        {"fsdp": 256},
        768,
        4096,
        9.052,
    ),
    keras_case({"model": 4, "batch": 2}, 0.147),
    keras_case({"batch": 2, "model": 4}, 0.205),
]


def plan(case):
    (mesh,) = kmd.plan(
        case.build,
        topology=case.topology,
        batch=case.batch,
        seq=case.seq,
        meshes=[case.mesh],
        layout=case.layout,
        dtype=case.dtype,
        remat=case.remat,
        suggest=False,
        verbose=False,
    ).meshes
    if mesh.error:
        raise RuntimeError(f"{case.name}: {mesh.error}")
    return mesh


def row(case, mesh):
    axes = ", ".join(f"{name}={size}" for name, size in case.mesh.items())
    gib = mesh.bytes["peak"] / 2**30
    return (
        f"| [{case.name}]({case.source}) | {case.topology}, {axes} "
        f"| {case.batch} x {case.seq} "
        f"| {case.seconds:.3g} s | {mesh.step_seconds:.3g} s "
        f"| {mesh.step_seconds / case.seconds:.2f} "
        f"| {mesh.parts['exposed_collectives'] / mesh.step_seconds:.0%} "
        f"| {gib:.1f}{'' if mesh.fits else ', too much'} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all if none")
    names = parser.parse_args().names
    print(
        "| model | chips | batch | published | estimate | ratio | waiting "
        "| GiB a chip |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        if not names or any(name in case.name for name in names):
            print(row(case, plan(case)), flush=True)


if __name__ == "__main__":
    main()
