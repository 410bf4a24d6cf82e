"""Layouts over several axes, and rules that mean the same everywhere."""

import warnings

import jax
import keras
import pytest

import keras_meshdist as kmd
from keras_meshdist.layout import find_rule


@pytest.fixture
def mesh():
    return kmd.make_mesh({"model": 2, "fsdp": 2, "data": 2})


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((None, "model"), (None, "model")),
        ([None, ["fsdp", "model"]], (None, ("fsdp", "model"))),
        ((("model", "fsdp", "data"),), (("model", "fsdp", "data"),)),
        ((("model",), ()), ("model", None)),
        ((), ()),
    ],
)
def test_a_layout_is_jax_sharding(mesh, axes, spec):
    layout = kmd.TensorLayout(axes, mesh)
    assert isinstance(layout, keras.distribution.TensorLayout)
    assert layout.axes == spec
    assert layout.backend_layout.spec == jax.sharding.PartitionSpec(*spec)
    assert layout.backend_layout.mesh.shape == {
        "model": 2,
        "fsdp": 2,
        "data": 2,
    }


def test_the_mesh_can_be_set_once(mesh):
    layout = kmd.TensorLayout(["model"])
    with pytest.raises(ValueError, match="device_mesh=None"):
        _ = layout.backend_layout
    layout.device_mesh = mesh
    assert layout.backend_layout.spec[0] == "model"
    with pytest.raises(ValueError, match="can be set once"):
        layout.device_mesh = mesh


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("nope",), r"\['nope'\] is unknown.*'model', 'fsdp', 'data'"),
        (("model", "model"), r"mesh axis once.*\('model', 'model'\)"),
        ((("fsdp", "model"), "fsdp"), "mesh axis once"),
        ((3,), "None, an axis name, or a sequence.*3"),
        (((None, "model"),), "None, an axis name, or a sequence"),
    ],
)
def test_bad_layouts(mesh, axes, message):
    with pytest.raises(ValueError, match=message):
        kmd.TensorLayout(axes, mesh)
    layout_map = kmd.LayoutMap(mesh)
    with pytest.raises(ValueError, match="Layout rule '.*kernel': .*"):
        layout_map[".*kernel"] = axes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("(", ("model",), r"valid regular expression.*'\('"),
        (3, ("model",), "as a string.*3"),
        ("a", "model", "sequence with an entry for each.*'model' for rule 'a'"),
        ("a", None, "sequence with an entry for each"),
    ],
)
def test_bad_rules(mesh, key, value, message):
    layout_map = kmd.LayoutMap(mesh)
    with pytest.raises(ValueError, match=message):
        layout_map[key] = value


def test_a_repeated_rule(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["a"] = ["model"]
    with pytest.raises(ValueError, match="a already exist"):
        layout_map["a"] = ["fsdp"]


def test_a_mesh_with_repeated_axis_names():
    mesh = keras.distribution.DeviceMesh((4, 2), ["a", "a"])
    with pytest.raises(ValueError, match=r"distinct.*\['a', 'a'\]"):
        kmd.LayoutMap(mesh)


@pytest.mark.parametrize("ours", [True, False])
class TestMatching:
    """The same for Keras' own maps, whatever the version of Keras."""

    def rules(self, mesh, ours, *rules):
        kind = kmd.LayoutMap if ours else keras.distribution.LayoutMap
        layout_map = kind(mesh)
        for rule in rules:
            layout_map[rule] = ("model",)
        return layout_map

    def test_an_equal_rule_goes_first(self, mesh, ours):
        m = self.rules(mesh, ours, ".*/kernel", "dense/kernel", "dense.*")
        assert find_rule(m, "dense/kernel") == "dense/kernel"

    def test_then_one_that_matches_it_all(self, mesh, ours):
        m = self.rules(mesh, ours, "kernel", ".*/kernel")
        assert find_rule(m, "dense/kernel") == ".*/kernel"

    def test_then_one_that_matches_a_part_with_one_warning(self, mesh, ours):
        m = self.rules(mesh, ours, "dense/kernel", ".*bias")
        with pytest.warns(UserWarning, match=r"only a part.*'\.\*dense/k"):
            found = find_rule(m, "sequential/dense/kernel")
        assert found == "dense/kernel"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            find_rule(m, "other/dense/kernel")
        assert find_rule(m, "other/dense/kernel", search=False) is None

    def test_a_part_takes_a_name_whole_or_not_at_all(self, mesh, ours):
        for rule in ("up/kernel", ".*up/kernel", "up/kern", "k"):
            m = self.rules(mesh, ours, rule)
            assert find_rule(m, "model/up/kernel_scale") is None
        for rule in ("up", "up/", "u", "kernel_scale", "scale", "up.*scale"):
            m = self.rules(mesh, ours, rule)
            with pytest.warns(UserWarning, match="only a part"):
                assert find_rule(m, "model/up/kernel_scale") == rule

    def test_a_part_of_the_path_of_an_output_says_so(self, mesh, ours):
        m = self.rules(mesh, ours, "dense")
        assert find_rule(m, "sequential/dense/output") is None
        m = self.rules(mesh, ours, "dense", "dense/output")
        with pytest.warns(UserWarning, match="only a part"):
            found = find_rule(m, "sequential/dense/output")
        assert found == "dense/output"

    def test_else_none(self, mesh, ours):
        assert find_rule(self.rules(mesh, ours, "bias"), "a/kernel") is None

    @pytest.mark.parametrize(
        "rules", [(".*kernel", "dense.*"), ("kernel", "dense")]
    )
    def test_two_are_an_error(self, mesh, ours, rules):
        m = self.rules(mesh, ours, *rules)
        with pytest.raises(ValueError, match="At most one.*'dense/kernel'"):
            find_rule(m, "dense/kernel")


def test_a_map_is_a_mapping(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["dense/kernel"] = [None, "model"]
    layout_map[".*bias"] = ["model"]
    assert isinstance(layout_map, keras.distribution.LayoutMap)
    assert layout_map["dense/kernel"].axes == (None, "model")
    assert layout_map["dense/bias"].axes == ("model",)
    assert layout_map["other"] is None
    assert "dense/kernel" in layout_map
    assert "other" not in layout_map
    assert list(layout_map) == ["dense/kernel", ".*bias"]
    del layout_map[".*bias"]
    assert len(layout_map) == 1
