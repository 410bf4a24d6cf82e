"""Layouts: which mesh axes split which dimensions, and rules for them."""

import functools
import re
import warnings

import jax
import keras

from keras_meshdist.mesh import check_axis_names, jax_mesh
from keras_meshdist.pieces import axes_of

ON_UNMATCHED = ("warn", "raise", "ignore")


class TensorLayout(keras.distribution.TensorLayout):
    """Which mesh axes split the dimensions of a tensor.

    Like `keras.distribution.TensorLayout`, with one addition: a dimension may
    be split over several mesh axes.

    Example:

    ```python
    layout = TensorLayout((None, ("fsdp", "model")), device_mesh)
    ```

    Args:
        axes: sequence with an entry for each dimension: an axis name, a
            sequence of axis names (the slowest varying first), or `None` for
            a dimension that isn't split.
        device_mesh: `keras.distribution.DeviceMesh`. Defaults to `None`; it
            can be set once, later.

    Raises:
        ValueError: if an entry is malformed, an axis isn't in the mesh, or an
            axis is used twice.
    """

    def __init__(self, axes, device_mesh=None):
        self._entries = tuple(_entry(entry, axes) for entry in axes)
        self._mesh = device_mesh
        self._sharding = None
        check_layout(self)

    @property
    def axes(self):
        return self._entries

    @property
    def device_mesh(self):
        return self._mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh):
        if self._mesh is not None:
            raise ValueError(
                "The device mesh of a layout can be set once. Received: "
                f"device_mesh={device_mesh}, and it has {self._mesh}."
            )
        self._mesh = device_mesh
        check_layout(self)

    @property
    def backend_layout(self):
        """The `jax.sharding.NamedSharding` of this layout."""
        if self._sharding is None:
            if self._mesh is None:
                raise ValueError(
                    "A layout needs a device mesh before it can be used. "
                    f"Received: axes={self.axes}, device_mesh=None."
                )
            self._sharding = jax.sharding.NamedSharding(
                jax_mesh(self._mesh), jax.sharding.PartitionSpec(*self.axes)
            )
        return self._sharding


def check_layout(layout):
    """Raises a ValueError if a layout's axes are repeated or not its mesh's.

    Args:
        layout: `keras.distribution.TensorLayout`, ours or Keras' own.
    """
    used = [axis for entry in layout.axes for axis in axes_of(entry)]
    if len(set(used)) != len(used):
        raise ValueError(
            f"A layout may use a mesh axis once. Received: axes={layout.axes}."
        )
    if layout.device_mesh is not None:
        unknown = set(used) - set(layout.device_mesh.axis_names)
        if unknown:
            raise ValueError(
                "A layout may use only axes of its mesh. Received: "
                f"axes={layout.axes}, where {sorted(unknown)} is unknown. "
                f"Valid axes: {list(layout.device_mesh.axis_names)}."
            )


def _entry(entry, axes):
    """One dimension's entry: None, a name, or a tuple of names."""
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, list | tuple) and all(
        isinstance(axis, str) for axis in entry
    ):
        # A tuple of one is the name itself, an empty one no split at all: so
        # equal layouts compare equal.
        return tuple(entry) if len(entry) > 1 else next(iter(entry), None)
    raise ValueError(
        "Each entry of a layout must be None, an axis name, or a sequence of "
        f"axis names. Received: {entry!r} in axes={axes!r}."
    )


class LayoutMap(keras.distribution.LayoutMap):
    """Layout rules: variable paths, or regular expressions, to layouts.

    Like `keras.distribution.LayoutMap`, with these differences:

    - A dimension may be split over several mesh axes, and lists are as good
      as tuples.
    - A rule means the same on every version of Keras. A path takes the rule
      that is equal to it; else the one that matches all of it; else, and only
      if nothing matched, the one that matches a part of it, with a warning.
      The part takes the variable's name whole or not at all, and that of a
      layer's output must have `output` in it.
      Two rules that match equally well are an error.

    Example:

    ```python
    layout_map = LayoutMap(device_mesh)
    layout_map[".*ffw_gating/kernel"] = (None, ("fsdp", "model"))
    layout_map["classifier/bias"] = ["model"]
    layout_map[".*dense/output"] = ("batch", None)  # a layer's output
    ```

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        on_unmatched: what to do about a rule that matches nothing, once a
            model is whole, at its first step: `"warn"`, `"raise"` or
            `"ignore"`. Defaults to `"warn"`.

    Raises:
        ValueError: if axis names of the mesh are empty or repeated, or
            `on_unmatched` is something else.
    """

    def __init__(self, device_mesh, on_unmatched="warn"):
        check_axis_names(tuple(device_mesh.axis_names))
        if on_unmatched not in ON_UNMATCHED:
            raise ValueError(
                "`on_unmatched` says what to do about a rule that matches "
                f"nothing. Received: on_unmatched={on_unmatched!r}. Valid: "
                f"{list(ON_UNMATCHED)}."
            )
        super().__init__(device_mesh)
        self.on_unmatched = on_unmatched

    def __getitem__(self, key):
        return layout_of(self, find_rule(self, key))

    def __contains__(self, key):
        return key in list(self)

    def __setitem__(self, key, layout):
        if not isinstance(key, str):
            raise ValueError(
                "A layout rule must be a path or a regular expression as a "
                f"string. Received: {key!r}."
            )
        try:
            re.compile(key)
        except re.error as e:
            raise ValueError(
                f"A layout rule must be a valid regular expression ({e}). "
                f"Received: {key!r}."
            ) from e
        if isinstance(layout, list | tuple):
            try:
                layout = TensorLayout(layout, self.device_mesh)
            except ValueError as e:
                raise ValueError(f"Layout rule {key!r}: {e}") from e
        elif not isinstance(layout, keras.distribution.TensorLayout):
            raise ValueError(
                "A layout must be a sequence with an entry for each dimension "
                f"of the tensor, or a `TensorLayout`. Received: {layout!r} "
                f"for rule {key!r}."
            )
        super().__setitem__(key, layout)


def matching_rules(layout_map, path, search=True):
    """Returns the rules of a layout map that match a path best.

    Args:
        layout_map: `keras.distribution.LayoutMap`, ours or Keras' own.
        path: str, path of a variable, or of a layer with `/output` behind it.
        search: bool, whether a rule may match a part of the path if no rule
            matches it all. Defaults to `True`.

    Returns:
        List of str: the rule that is equal to the path, else those that match
        all of it, else those that match a part.
    """
    rules = list(layout_map)
    if path in rules:
        return [path]
    found = [rule for rule in rules if re.fullmatch(rule, path)]
    if not found and search:
        found = [rule for rule in rules if _matches_part(rule, path)]
    return found


def _matches_part(rule, path):
    # The beginning of a variable's name is another name: a rule for `kernel`
    # doesn't mean the `kernel_scale` of a quantized layer.
    name, whole = path.rfind("/") + 1, len(path)
    ends = {part.end() for part in re.finditer(rule, path)}
    if path.endswith("/output"):
        # A part of a layer's path alone means the layer's variables.
        return whole in ends
    return any(end <= name or end == whole for end in ends)


def find_rule(layout_map, path, search=True):
    """Returns the rule of a layout map that a path takes.

    Args:
        layout_map: `keras.distribution.LayoutMap`, ours or Keras' own.
        path: str, path of a variable, or of a layer with `/output` behind it.
        search: bool, as in `matching_rules`. Defaults to `True`.

    Returns:
        The rule, a str, or `None` if none matches.

    Raises:
        ValueError: if two rules match equally well.
    """
    found = matching_rules(layout_map, path, search)
    if len(found) > 1:
        raise ValueError(
            "At most one layout rule may match a path. "
            f"Received: {found} for path {path!r}. "
            "Write narrower rules; a rule equal to the path goes first."
        )
    if not found:
        return None
    (rule,) = found
    vars(layout_map).setdefault("_used_rules", set()).add(rule)
    if rule != path and not re.fullmatch(rule, path):
        _warn_of_search(layout_map, rule, path)
    return rule


def _warn_of_search(layout_map, rule, path):
    warned = vars(layout_map).setdefault("_searched_rules", set())
    if rule not in warned:
        warned.add(rule)
        warnings.warn(
            f"The layout rule {rule!r} matches only a part of the path "
            f"{path!r}. It is used, because no rule matches all of it. "
            f"To say that you mean it, write {'.*' + rule!r} or the path.",
            stacklevel=2,
        )


def layout_of(layout_map, rule):
    """Returns the layout that stands under a rule itself.

    Args:
        layout_map: `keras.distribution.LayoutMap`, ours or Keras' own.
        rule: str, a key of the map, or `None`.

    Returns:
        A `keras.distribution.TensorLayout`; `None` for rule `None`.
    """
    if rule is None:
        return None
    # Keras' own lookup finds an exact key first, on every version.
    return keras.distribution.LayoutMap.__getitem__(layout_map, rule)


@functools.partial(jax.jit, static_argnums=1)
def constrain(tensor, sharding):
    """Lays a tensor out; in jit its rows need not divide."""
    return jax.lax.with_sharding_constraint(tensor, sharding)


def sharding_of(layout):
    """The `NamedSharding` of a layout of ours, of Keras, or of JAX."""
    if isinstance(layout, TensorLayout):
        return layout.backend_layout
    if isinstance(layout, keras.distribution.TensorLayout):
        return TensorLayout(layout.axes, layout.device_mesh).backend_layout
    return layout
