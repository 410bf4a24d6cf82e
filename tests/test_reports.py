"""What `kmd.inspect` says of layout rules."""

import warnings
from xml.etree import ElementTree

import keras
import numpy as np
import pytest
from rich.console import Console

import keras_meshdist as kmd
from keras_meshdist import cli, pictures, reports
from tests import models


@pytest.fixture
def mesh():
    keras.utils.clear_session()
    return kmd.make_mesh({"batch": 2, "model": 4})


def findings(layout_map, build=models.transformer):
    return reports.examine(kmd.abstract(build), layout_map).findings


def text(renderable):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_good_layout_has_no_findings_but_small_ones(mesh):
    layout_map = kmd.layouts.auto(models.transformer, mesh)
    assert findings(layout_map) == []


def test_a_misspelt_rule_names_what_was_meant(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map[".*/up/kernal"] = (None, "model")
    layout_map[".*atention_output/kernel"] = ("model", None, None)
    kinds = {f.about: f for f in findings(layout_map)}
    assert kinds[".*/up/kernal"].kind == "unmatched rule"
    assert "did you mean 'up/kernel'?" in kinds[".*/up/kernal"].message
    found = kinds[".*atention_output/kernel"].message
    assert "did you mean 'multi_head_attention/attention_output/" in found


def test_rules_for_outputs_count(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/output"] = ("batch", None, "model")
    assert findings(layout_map) == []


@pytest.mark.parametrize(
    ("rules", "kind", "words"),
    [
        (
            {"up/.*": (None, "model"), ".*p/kernel": (None, "model")},
            "two rules",
            ["'up/kernel'", "up/.*", ".*p/kernel"],
        ),
        ({"up/bias": (None, "model")}, "wrong rank", ["up/bias", "(128,)"]),
        (
            {"head/kernel": (None, "model")},
            "doesn't divide",
            ["head/kernel", "size 3", "4 pieces"],
        ),
        (
            {"up/kernel": (None, "model")},
            "large and replicated",
            ["embedding/embeddings", "KiB", "%"],
        ),
        (
            {"up/kernel": (None, "batch")},
            "unused axis",
            ["'model'", "4 devices do the same"],
        ),
    ],
)
def test_each_kind_of_finding(mesh, rules, kind, words):
    layout_map = kmd.LayoutMap(mesh)
    for rule, axes in rules.items():
        layout_map[rule] = axes
    found = [f.message for f in findings(layout_map) if f.kind == kind]
    assert any(all(word in message for word in words) for message in found), (
        found
    )


def test_an_axis_used_twice_in_a_map_of_keras_own(mesh):
    class Twice(keras.distribution.TensorLayout):
        axes = ("model", "model")

    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["up/kernel"] = Twice(("model", None), mesh)
    (found,) = [f for f in findings(layout_map) if f.kind == "axis used twice"]
    assert "['model'] twice" in found.message


def test_bytes_on_a_device(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")

    def build():
        model = models.transformer()
        model.compile("adam", "mse")
        return model

    report = reports.examine(kmd.abstract(build), layout_map)
    rows = {row.path: row for row in report.rows}
    assert rows["up/kernel"].device_bytes == 64 * 128 * 4 // 4
    assert rows["up/kernel"].slots_bytes == 2 * 64 * 128 * 4 // 4
    assert rows["up/bias"].device_bytes == 128 * 4
    saved = 64 * 128 * 4 * 3 // 4
    assert report.device_bytes == report.total_bytes - saved
    assert "KiB" in text(report)


def test_inspect_prints_and_takes_the_current_rules(mesh, capsys):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with dist.scope():
        report = kmd.inspect(models.transformer)
    assert "large and replicated" in capsys.readouterr().out
    assert "variables" in repr(report)
    with pytest.raises(ValueError, match="Received: layout_map=None"):
        kmd.inspect(models.transformer)


def test_a_picture_of_the_shards(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/kernel"] = ("batch", "model")
    report = reports.examine(kmd.abstract(models.transformer), layout_map)
    drawn = text(report.picture("up/kernel"))
    for part in ("[0:32, 0:32]", "[32:64, 96:128]"):
        assert drawn.count(part) == 1
    with pytest.raises(ValueError, match="Nearest: \\['up/kernel'\\]"):
        report.picture("up/kernal")


def test_a_picture_is_a_drawing_too(mesh, tmp_path):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/kernel"] = ("batch", None)
    report = reports.examine(kmd.abstract(models.transformer), layout_map)
    report.picture("up/kernel").save(tmp_path / "kernel.svg")
    drawn = ElementTree.parse(tmp_path / "kernel.svg").getroot()
    texts = [element.text for element in drawn.iter() if element.text]
    assert texts.count("[0:32, 0:128]") == texts.count("[32:64, 0:128]") == 4
    assert {"batch 1", "model 3", "device 7"} <= set(texts)
    # Devices that hold the same part have the same color.
    fills = [e.get("fill") for e in drawn.iter() if e.tag.endswith("rect")]
    assert len(set(fills[:4])) == len(set(fills[4:])) == 1
    assert fills[0] != fills[4]


def test_a_picture_of_rows():
    process_ids = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])
    drawn = text(
        pictures.picture_of_rows(
            process_ids, ("model", "batch"), ("batch",), 13
        )
    )
    assert drawn.count("rows 0–6") == 4  # noqa: RUF001
    assert drawn.count("rows 7–12, 1 padding") == 4  # noqa: RUF001
    assert drawn.count("process 0") == drawn.count("process 1") == 4
    with pytest.raises(ValueError, match="at most three axes"):
        pictures.picture_of_rows(np.zeros((1,) * 4), "abcd", "a", 13)


def test_a_distribution_draws_its_rows():
    mesh = kmd.make_mesh({"a": 2, "b": 2, "c": 2})
    dist = kmd.ModelParallel(
        layout_map=kmd.LayoutMap(mesh), batch_dim_name=("c", "a")
    )
    drawn = text(dist.picture(5))
    places = [drawn.index(f"a={n}") for n in range(2)]
    # The shards of two rows go over "c" first, then "a"; "b" has replicas.
    for block, rows in zip(
        (drawn[: places[1]], drawn[places[1] :]),
        (["rows 0–1", "row 4, 1 padding"], ["rows 2–3", "padding only"]),  # noqa: RUF001
        strict=True,
    ):
        assert all(block.count(held) == 2 for held in rows)


def test_a_picture_of_three_axes():
    mesh = kmd.make_mesh({"a": 2, "b": 2, "c": 2})
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/kernel"] = ("c", None)
    report = reports.examine(kmd.abstract(models.transformer), layout_map)
    drawn = text(report.picture("up/kernel"))
    assert drawn.count("[0:32, 0:128]") == 4
    assert "a=1" in drawn


class TestOnUnmatched:
    def fit(self, layout_map):
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        models.train("mlp", dist=dist)

    def test_it_warns_once(self, mesh):
        layout_map = kmd.LayoutMap(mesh)
        layout_map["nowhere/kernel"] = (None, "model")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.fit(layout_map)
        assert sum("'nowhere/kernel'" in str(w.message) for w in caught) == 1

    def test_it_raises_before_the_first_step(self, mesh):
        layout_map = kmd.LayoutMap(mesh, on_unmatched="raise")
        layout_map["nowhere/kernel"] = (None, "model")
        with pytest.raises(ValueError, match="did you mean"):
            self.fit(layout_map)

    def test_it_is_quiet(self, mesh):
        layout_map = kmd.LayoutMap(mesh, on_unmatched="ignore")
        layout_map["nowhere/kernel"] = (None, "model")
        self.fit(layout_map)

    def test_what_else(self, mesh):
        with pytest.raises(ValueError, match="'warn', 'raise', 'ignore'"):
            kmd.LayoutMap(mesh, on_unmatched="shout")


def test_the_command(capsys):
    assert (
        cli.main(
            ["inspect", "tests.models:transformer", "--mesh", "batch=2,model=4"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "batch=2, model=4" in printed
    assert "on each device" in printed


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["tests.models:transformer", "--mesh", "model"], "model=4,batch=2"),
        (["tests.models:no", "--mesh", "batch=8"], "my_module:build_model"),
    ],
)
def test_a_wrong_command(arguments, word, capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", *arguments])
    assert word in capsys.readouterr().err
