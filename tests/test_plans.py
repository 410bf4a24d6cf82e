"""Plans that are compiled; those for TPUs need libtpu."""

import dataclasses
import gzip
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import time

import pytest
from rich.console import Console

import keras_meshdist as kmd
from keras_meshdist import cli
from keras_meshdist.planner import (
    pool,
    products,
    program,
    sources,
    topologies,
)
from keras_meshdist.planner.chips import CPU
from keras_meshdist.planner.figures import Job
from keras_meshdist.planner.topologies import topology_of
from tests import plans

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU takes libtpu: pip install keras-meshdist[plan]",
)
_COLLECTIVE = re.compile(
    r"= (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(?:-start)?\("
)
_SIZES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "keras_meshdist" / "plans"


def texts(folder):
    """What the compiler printed of the programs that were compiled."""
    return [
        json.loads(gzip.decompress(path.read_bytes()))["text"]
        for path in sorted(folder.glob("*.gz"))
    ]


def counted(text):
    """Number and bytes of the collectives in a program without loops.

    The bytes of the results; of a gather that is begun apart, whose shape has
    both, the result is what comes last.
    """
    number = size = 0
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if not match:
            continue
        number += 1
        arrays = re.findall(
            r"(\w+)\[([\d,]*)\]", re.sub(r"{.*?}", "", match[1])
        )
        if "all-gather-start" in line or "collective-permute-start" in line:
            arrays = arrays[1:2]
        if "reduce-scatter" in line:
            raise ValueError("its operand would have to be found")
        size += sum(
            _SIZES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
            for dtype, dims in arrays
        )
    return number, size


def run(capsys, *argv):
    """Runs the command line; returns its status and what it says is wrong."""
    status = cli.main(["plan", *argv])
    return status, " ".join(capsys.readouterr().err.split())


class TestErrors:
    def test_unknown_topology(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:dense", "--topology", "v5e-9", "--batch", "8"),
        )
        assert status == 2
        assert "Received: topology='v5e-9'. Nearest: ['v5e-8'" in text

    def test_mesh_that_doesn_t_multiply(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:dense", "--topology", "cpu:8", "--batch", "8"),
            *("--mesh", "model=3,batch=2"),
        )
        assert status == 2
        assert "Received: model=3,batch=2 for 8 chips" in text

    def test_no_such_function(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:nothing", "--topology", "cpu:8", "--batch", "8"),
        )
        assert status == 2
        assert "'tests.plans:nothing'" in text

    def test_two_models(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:dense", "--topology", "cpu:8", "--batch", "8"),
            *("--hub", "GemmaCausalLM"),
        )
        assert status == 2
        assert "One model is planned" in text

    @pytest.mark.parametrize(
        ("version", "message"),
        [
            (None, "Received: none installed"),
            ("0.0.1", "libtpu 0.0.1 with JAX"),
        ],
    )
    def test_libtpu(self, capsys, monkeypatch, version, message):
        from keras_meshdist.planner import libtpu

        real = libtpu.importlib.metadata.version

        def version_of(package):
            if package != "libtpu":
                return real(package)
            if version is None:
                raise libtpu.importlib.metadata.PackageNotFoundError
            return version

        monkeypatch.setattr(libtpu.importlib.metadata, "version", version_of)
        monkeypatch.setattr(libtpu, "needed_version", lambda: "0.0.42.*")
        status, text = run(
            capsys,
            *("tests.plans:dense", "--topology", "v5e-8", "--batch", "8"),
        )
        assert status == 2
        assert message in text
        assert "pip install 'jax[tpu]==" in text


@pytest.mark.extra
class TestOnVirtualDevices:
    def test_raising_function(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:raising", "--topology", "cpu:2", "--batch", "8"),
            *("--mesh", "batch=2"),
        )
        assert status == 2
        assert "KeyError: 'no such preset'" in text
        assert "Traceback" not in text

    def test_model_that_isn_t_compiled(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:uncompiled", "--topology", "cpu:2", "--batch", "8"),
            *("--mesh", "batch=2"),
        )
        assert status == 2
        assert "without an optimizer" in text

    def test_plan(self, cache):
        report = kmd.plan(
            lambda: plans.dense(),
            topology="cpu:4",
            batch=6,
            meshes=[{"batch": 4}, {"batch": 2, "model": 2}, {"model": 4}],
            layout=lambda mesh: plans.over_columns(mesh),
            verbose=False,
        )
        found = {mesh.axes: mesh for mesh in report.meshes}
        only_rows, both = (("batch", 4),), (("batch", 2), ("model", 2))
        # The layout's axes aren't in these meshes.
        assert "'model'" in found[only_rows].error
        assert found[(("model", 4),)].error
        assert found[both].error is None
        kernels = 4 * (1024 * 4096 * 2 // 2 + 1024 * 16)
        biases = 4 * (4096 + 1024 + 16)
        assert found[both].bytes["weights"] == kernels + biases
        assert found[both].feeds == {"0": [0, 1, 2, 3, 4, 5]}
        assert len(texts(cache)) == 1


@needs_libtpu
@pytest.mark.extra
class TestForTpu:
    def test_every_axis_order(self, cache):
        """13 rows, every order, and no chip has more than its share."""
        one = kmd.plan(
            plans.dense,
            topology="v5e-1",
            batch=16,
            meshes=[{"batch": 1}],
            verbose=False,
        )
        (alone,) = one.meshes
        shapes = [(4, 2), (2, 4)]
        meshes = [
            dict(zip(names, shape, strict=True))
            for shape, names in itertools.product(
                shapes, itertools.permutations(("model", "batch"))
            )
        ]
        report = kmd.plan(
            plans.dense,
            topology="v5e:2x4",
            batch=13,
            meshes=meshes,
            verbose=False,
        )
        for mesh in report.meshes:
            assert mesh.error is None
            assert mesh.fits
            axes = dict(mesh.axes)
            # The products are shared by all; each updates its own weights,
            # by two operations an element.
            updates = alone.bytes["weights"] // 4 * 2
            share = (alone.flops - updates) / 8
            share += mesh.bytes["weights"] // 4 * 2
            assert mesh.flops < 1.05 * share
            assert mesh.rows == 13
            # Two hosts of 2 x 2 chips: all rows are fed, whichever feeds them.
            fed = set().union(*map(set, mesh.feeds.values()))
            assert fed == set(range(13))
            weights = 4 * (
                (1024 * 4096 * 2 + 1024 * 16 + 4096 + 16) // axes["model"]
                + 1024
            )
            rows = -(-13 // axes["batch"])
            batch = rows * 4 * (1024 + 1)
            # The learning rate, the number of steps, and the mean loss.
            others = 4 * (1 + 1 + 2)
            sizes = mesh.bytes
            assert sizes["weights"] == weights
            assert sizes["arguments_unpadded"] == weights + batch + others
            # All else that the compiler counts fills tiles up.
            assert sizes["arguments"] == (
                sizes["arguments_unpadded"] + sizes["arguments_padding"]
            )
        self._all_collectives_are_there([*report.meshes, alone], cache)
        # Products, by their shapes, are what the compiler counts.
        for path in cache.glob("*.gz"):
            found = json.loads(gzip.decompress(path.read_bytes()))
            lines = program.parse(found["text"]).computations.values()
            made = sum(map(products.flops_of_products, lines))
            # Besides them there are the updates, two for each weight.
            updates = 2 * (1024 * 4096 * 2 + 1024 * 16 + 4096 + 1024 + 16)
            assert made <= found["cost"]["flops"] <= made + 2 * updates

    def _all_collectives_are_there(self, meshes, cache):
        listed = sorted(
            (
                sum(c["count"] for c in mesh.collectives),
                sum(c["count"] * c["bytes"] for c in mesh.collectives),
            )
            for mesh in meshes
        )
        assert listed == sorted(map(counted, texts(cache)))
        assert sum(number for number, _ in listed) > 4

    def test_loop(self, cache):
        """What is in a loop of twelve turns counts twelve times."""
        report = kmd.plan(
            plans.recurrent,
            topology="v5e:2x4",
            batch=8,
            meshes=[{"batch": 2, "model": 4}],
            verbose=False,
        )
        (mesh,) = report.meshes
        assert mesh.error is None
        assert mesh.notes == ()
        (text,) = texts(cache)
        bodies = re.findall(r"while\(.*?body=%?([\w.\-]+)", text)
        # Forwards and backwards.
        assert len(bodies) == 2
        number = counted(text)[0]
        for body in bodies:
            inside = text[text.index(f"\n%{body} (") + 1 :]
            inside = inside[: inside.index("\n}")]
            assert counted(inside)[0] > 0
            number += 11 * counted(inside)[0]
        assert sum(c["count"] for c in mesh.collectives) == number
        # Forwards and backwards, twelve times, shared by eight chips.
        products_once = 2 * 8 * 3 * 256 * (64 + 256)
        assert mesh.flops > 2 * 12 * products_once / 8

    def test_too_large(self, capsys):
        status, text = run(
            capsys,
            *("tests.plans:huge", "--topology", "v5e-1", "--batch", "8"),
        )
        assert status == 2
        text = " ".join(text.split())
        assert "out of memory at compile time" in text
        assert "which has 15.75 GiB" in text
        assert "sequential/wide/kernel 64.00 GiB" in text

    def test_again_from_the_cache(self, cache):
        def plan():
            return kmd.plan(
                plans.dense,
                topology="v5e-4",
                batch=8,
                meshes=[{"batch": 4}],
                verbose=False,
            ).to_json()

        first = plan()
        (path,) = cache.glob("*.gz")
        before = path.stat().st_mtime_ns
        assert plan() == first
        assert path.stat().st_mtime_ns == before

    @pytest.mark.full
    @pytest.mark.parametrize("build", [plans.deep, plans.alternating])
    def test_deep_model_from_shallow_ones(self, build):
        def plan(whole):
            (mesh,) = kmd.plan(
                build,
                topology="v5e:2x4",
                batch=16,
                meshes=[{"fsdp": 2, "model": 4}],
                whole=whole,
                verbose=False,
            ).meshes
            assert mesh.error is None
            return mesh

        few, all_of_it = plan(False), plan(True)
        assert any("extrapolated" in note for note in few.notes)
        assert not all_of_it.notes
        for part in ("arguments", "arguments_unpadded", "outputs", "alias"):
            assert few.bytes[part] == pytest.approx(
                all_of_it.bytes[part], rel=0.01
            )
        assert few.flops == pytest.approx(all_of_it.flops, rel=0.01)
        low, high = few.temporaries_range
        temporaries = all_of_it.bytes["temporaries"]
        assert 0.95 * low <= temporaries <= 1.05 * high

        def exchanged(mesh):
            found = {}
            for c in mesh.collectives:
                key = c["kind"], tuple(c["axes"])
                number, size = found.get(key, (0, 0))
                found[key] = (
                    number + c["count"],
                    size + c["count"] * c["bytes"],
                )
            return found

        assert exchanged(few).keys() == exchanged(all_of_it).keys()
        for key, figures in exchanged(all_of_it).items():
            assert exchanged(few)[key] == pytest.approx(figures, rel=0.01), key


@pytest.mark.extra
def test_tune(capsys):
    status = cli.main(
        [
            *("tune", "tests.plans:dense", "--batch", "8", "--devices", "4"),
            *("--mesh", "batch=4", "--mesh", "batch=2,model=2"),
            *("--steps", "2"),
        ]
    )
    text = capsys.readouterr().out
    assert status == 0
    table = text[text.index("A step, in milliseconds") :]
    for name in ("batch=4", "batch=2, model=2"):
        (line,) = [line for line in table.splitlines() if name in line]
        estimated, measured = re.findall(r"[\d.]+(?=\s*│)", line)[-2:]
        assert float(estimated) > 0
        assert float(measured) > 0


GEMMA = {
    "vocabulary_size": 64,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 1,
    "hidden_dim": 32,
    "intermediate_dim": 64,
    "head_dim": 8,
}
needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None,
    reason="models of KerasHub need it: pip install keras-hub",
)
MESH = {"batch": 2, "model": 4}
# What one does to one's own program, to have what a suggestion says.
BY_HAND = {
    "rematerialization by block": {"build": plans.few_again},
    "activations split over the model axis and rematerialization": {
        "build": plans.few_again,
        "layout": plans.over_the_model_axis,
    },
    "FSDP over the batch axis and rematerialization": {
        "build": plans.few_again,
        "mesh": {"fsdp": 2, "model": 4},
    },
    "bfloat16 and rematerialization": {
        "build": plans.few_again,
        "dtype": "bfloat16",
    },
    "a batch of 8 and rematerialization": {
        "build": plans.few_again,
        "batch": 8,
    },
}


@pytest.mark.full
class TestSuggestions:
    def plan(self, build=plans.few, mesh=MESH, batch=16, **settings):
        return kmd.plan(
            build,
            topology="cpu:8",
            batch=batch,
            meshes=[mesh],
            verbose=False,
            **settings,
        )

    def limit(self, monkeypatch, size):
        """Gives virtual devices so much memory."""
        small = dataclasses.replace(CPU, hbm_bytes=size)
        monkeypatch.setattr(topologies, "CPU", small)

    def test_each_is_compiled(self, monkeypatch, cache):
        self.limit(monkeypatch, 1)
        report = self.plan()
        assert [words for words, _ in report.suggestions] == list(BY_HAND)
        before = len(texts(cache))
        assert before == 1 + len(BY_HAND)
        for words, mesh in report.suggestions:
            assert not mesh.fits
            (mine,) = self.plan(**BY_HAND[words], suggest=False).meshes
            assert mine.error is None
            # The program that one gets is the very one that was compiled.
            assert mine.bytes == mesh.bytes, words
            assert mine.axes == mesh.axes
        assert len(texts(cache)) == before

    def test_what_is_said_to_fit_does(self, monkeypatch):
        self.limit(monkeypatch, 1)
        sizes = {
            words: mesh.bytes["peak"] for words, mesh in self.plan().suggestions
        }
        for size in sorted(sizes.values())[:2]:
            self.limit(monkeypatch, size)
            report = self.plan()
            (mesh,) = report.meshes
            if mesh.fits:
                # The change makes it no smaller.
                assert not report.suggestions
                continue
            # It goes on to the first that fits, and no further.
            fits = [found.fits for _, found in report.suggestions]
            assert any(fits[-2:])
            assert not any(fits[:-2])
            for words, found in report.suggestions:
                assert found.bytes["peak"] == sizes[words]
                assert found.fits == (sizes[words] <= size)
            said = io.StringIO()
            Console(width=2000, file=said).print(report)
            assert said.getvalue().count("it fits") == sum(
                found.fits for _, found in report.suggestions
            )

    @needs_hub
    def test_lora(self, monkeypatch):
        hub = sources.HubModel("GemmaCausalLM", {**GEMMA, "num_layers": 4})
        self.limit(monkeypatch, 1)
        (*_, (words, mesh)) = self.plan(hub, seq=16).suggestions
        assert words == "LoRA of rank 8 and rematerialization"

        def by_hand():
            import keras

            model = hub.load()()
            model.backbone.enable_lora(8)
            model.compile(
                keras.optimizers.Adam(2e-5),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            return kmd.remat_blocks(model)

        (mine,) = self.plan(by_hand, seq=16, suggest=False).meshes
        for part in ("arguments", "temporaries", "optimizer"):
            assert mine.bytes[part] == mesh.bytes[part]
        self.limit(monkeypatch, mine.bytes["peak"])
        (*_, (words, mesh)) = self.plan(hub, seq=16).suggestions
        assert mesh.fits


class TestSteps:
    """In this process, on the virtual devices of the tests."""

    def answer(self, build, axes, batch=8, **settings):
        job = Job(
            sources.travelling(build),
            topology_of("cpu:8"),
            tuple(axes.items()),
            batch,
            **settings,
        )
        found = job.answer()
        assert found["error"] is None, found["traceback"]
        return found

    @pytest.mark.extra
    def test_kinds_of_steps(self):
        axes = {"batch": 8, "model": 1}
        train, test, predict = (
            self.answer(plans.dense, axes, kind=kind)
            for kind in ("train", "test", "predict")
        )
        # Of the layers' products each chip makes those of one row; for the
        # gradients about twice as many more.
        once = 2 * (1024 * 4096 * 2 + 1024 * 16)
        assert predict["flops"] == pytest.approx(once, rel=0.05)
        assert test["flops"] == pytest.approx(once, rel=0.05)
        assert train["flops"] > 2 * once
        assert {c["axes"][0] for c in train["collectives"]} == {"batch"}
        assert not predict["collectives"]

    @pytest.mark.extra
    def test_weights_are_counted_as_they_lie(self):
        whole = 4 * (1024 * 4096 * 2 + 1024 * 16)
        rest = 4 * (4096 + 1024 + 16)
        for axes in ({"batch": 8, "model": 1}, {"batch": 2, "model": 4}):
            found = self.answer(plans.dense, axes)["bytes"]
            model = axes["model"]
            assert found["weights"] == pytest.approx(
                whole / model + rest, rel=0.002
            )
        fsdp = self.answer(plans.dense, {"fsdp": 8})["bytes"]
        assert fsdp["weights"] == pytest.approx(whole / 8 + rest, rel=0.02)

    def test_axis_that_nothing_uses(self):
        found = self.answer(plans.dense, {"batch": 4, "tensor": 2})
        (note,) = found["notes"]
        assert "over the axis 'tensor': its 2 chips do the same" in note

    def test_batch_of_shapes(self):
        batch = ({"x": (6, 4)}, ((6, 1), "float32"), (6,))
        found = self.answer(plans.named_inputs, {"batch": 8}, batch)
        assert found["rows"] == 6

    @pytest.mark.parametrize(
        ("build", "batch", "message"),
        [
            (plans.open_length, 8, "Give `seq`"),
            (plans.dense, 0, "one row or more"),
            (plans.dense, ((8, 1024),), "a tuple (x, y)"),
            (plans.dense, ("rows", 3), "a shape and a dtype"),
        ],
    )
    def test_batches_that_say_too_little(self, build, batch, message):
        job = Job(
            sources.travelling(build),
            topology_of("cpu:8"),
            (("batch", 8),),
            batch,
        )
        assert message in job.answer()["error"]

    def test_length_of_sequences(self):
        found = self.answer(plans.open_length, {"batch": 8}, 8, seq=32)
        assert found["tokens"] == 8 * 32


class Waiting:
    """A job that takes longer than anyone waits."""

    axes = (("batch", 1),)

    def environment(self):
        return {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}

    def answer(self):
        time.sleep(600)


@pytest.mark.extra
def test_who_stops_waiting_ends_the_processes():
    begin = time.monotonic()
    answers = pool.answers([Waiting(), Waiting()])
    assert next(answers) == (0, None)
    answers.close()
    assert time.monotonic() - begin < 60


@pytest.mark.extra
def test_process_that_dies_is_an_error_of_its_mesh():
    answers = [found for _, found in pool.answers([Dying()]) if found]
    assert answers[0]["axes"] == Dying.axes
    assert "ran out of memory" in answers[0]["error"]


class Dying(Waiting):
    """A job whose process is killed, as it is when memory runs out."""

    def answer(self):
        os.kill(os.getpid(), signal.SIGKILL)


LLAMA = {
    "vocabulary_size": 512,
    "num_layers": 8,
    "num_query_heads": 4,
    "num_key_value_heads": 4,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
}


@needs_libtpu
@needs_hub
@pytest.mark.full
def test_rematerialized_blocks_take_less_of_a_chip():
    kept, again = (
        kmd.plan(
            sources.HubModel("LlamaCausalLM", LLAMA),
            topology="v5e-4",
            batch=16,
            seq=512,
            meshes=[{"batch": 4}],
            dtype="bfloat16",
            remat=remat,
            whole=True,
            verbose=False,
        ).meshes[0]
        for remat in (False, True)
    )
    assert kept.error is None
    assert again.error is None
    assert again.bytes["arguments"] == kept.bytes["arguments"]
    # Of each block but the last, at least the gate's and the other
    # projection's results are kept no more: four rows of a chip.
    freed = 7 * 2 * 4 * 512 * 1024 * 2
    assert again.bytes["temporaries"] < kept.bytes["temporaries"] - freed
    # Most of what is made forwards, a third of all, is made twice.
    assert 1.2 < again.flops / kept.flops < 4 / 3


@needs_hub
@pytest.mark.full
class TestHub:
    def test_by_name(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(GEMMA))
        job = Job(
            sources.HubModel.from_file("GemmaCausalLM", path),
            topology_of("cpu:8"),
            (("batch", 2), ("model", 4)),
            6,
            16,
        )
        found = job.answer()
        assert found["error"] is None, found["traceback"]
        assert (found["rows"], found["tokens"]) == (6, 96)
        assert found["has_backbone"]
        assert any(
            "decoder_block_" in c["source"] for c in found["collectives"]
        )

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="Nearest: .*GemmaCausalLM"):
            sources.HubModel("GemaCausalLM", GEMMA).load()

    def test_changes(self):
        job = Job(
            sources.HubModel("GemmaCausalLM", {**GEMMA, "num_layers": 6}),
            topology_of("cpu:8"),
            (("batch", 2), ("model", 4)),
            6,
            16,
        )
        weights = job.answer()["bytes"]
        lora = dataclasses.replace(job, changes=("lora", "remat")).answer()
        assert lora["error"] is None, lora["traceback"]
        assert lora["bytes"]["optimizer"] < weights["optimizer"] / 2
        # A model of two blocks by itself would get other layouts.
        cut = dataclasses.replace(job, units=2).answer()
        assert cut["units"] == 6
        tables = 64 * 32 + 32
        blocks = weights["weights"] - 4 * tables / 4
        assert cut["bytes"]["weights"] == 4 * tables / 4 + blocks / 3

    @needs_libtpu
    def test_attention_without_a_mask(self):
        """Keras' fused kernel for it can't be split over a mesh."""
        for axes in (("model", 4), ("batch", 2)), (("batch", 4), ("model", 2)):
            job = Job(plans.vision, topology_of("v5e-8"), axes, 8)
            found = job.answer()
            assert found["error"] is None, found["traceback"]
            assert any(
                c["axes"] == ["model"] and "attention" in c["source"]
                for c in found["collectives"]
            )
