"""From the layout of each variable to rules that a second build takes too."""

import collections
import re

from keras_meshdist import keras_hooks
from keras_meshdist.model_layout_map import ModelLayoutMap, split_number


def automatic_names(model):
    """Returns the names of layers that Keras gave them."""
    layers = [model, *keras_hooks.layers_of(model)]
    names = [(_class_name(layer), layer.name) for layer in layers]
    return {name for base, name in names if split_number(name)[0] == base}


def _class_name(layer):
    name = re.sub(r"\W+", "", type(layer).__name__)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def rules_for(axes, automatic, loose=frozenset()):
    """Yields as few rules as give each path its layout.

    Args:
        axes: dict from path to the layout's axes, a tuple; also of variables
            that aren't split.
        automatic: set of names that Keras gave to layers.
        loose: set of those among them whose numbers can't be told apart in
            another build. Paths that differ in nothing else, and have
            different layouts, get no rule.

    Yields:
        Tuples of a rule, its layout's axes, and the paths that it is for.
    """
    for pattern, paths in _groups(axes, automatic, _any_number).items():
        if len({axes[path] for path in paths}) == 1:
            yield pattern, axes[paths[0]], paths
            continue
        for pattern, some in _groups(paths, automatic, _own_number).items():
            if len({axes[path] for path in some}) == 1:
                yield pattern, axes[some[0]], some
                continue
            for pattern, few in _groups(some, loose, _own_number).items():
                if len({axes[path] for path in few}) == 1:
                    yield pattern, axes[few[0]], few


def _groups(paths, automatic, number_of):
    groups = collections.defaultdict(list)
    for path in paths:
        names = [_pattern(n, automatic, number_of) for n in path.split("/")]
        groups["/".join(names)].append(path)
    return dict(groups)


def _pattern(name, automatic, number_of):
    base, _ = split_number(name)
    if name in automatic:
        return re.escape(base) + r"(_\d+)?"
    return re.escape(base) + number_of(name[len(base) :])


def _any_number(number):
    return number and r"_\d+"


def _own_number(number):
    return number


def lora_axes(axes):
    """Returns what LoRA adds to a kernel, by name, with its axes.

    Keras' layers add `kernel_a` of the kernel's shape but for the last
    dimension, which is the rank, and `kernel_b` of the rank and the last one.
    """
    return {"a": (*axes[:-1], None), "b": (None, axes[-1])}


def make_map(device_mesh, model, axes, outputs):
    """Returns the rules that give a model's variables their layouts.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        model: `keras.Model`.
        axes: dict from path to the layout's axes, of the model's variables in
            the order of `model.variables`.
        outputs: dict from path to what `output_axes` says of a layer.
    """
    automatic = automatic_names(model)
    shapes = {v.path: tuple(v.shape) for v in model.variables}
    layout_map = ModelLayoutMap(device_mesh, shapes, automatic)
    axes, optional = dict(axes), set()
    for layer in keras_hooks.layers_of(model):
        if not hasattr(layer, "enable_lora"):
            continue
        for name in ("kernel", "embeddings"):
            split = axes.get(f"{layer.path}/{name}", ())
            if len(split) > 1:
                for part, found in lora_axes(split).items():
                    path = f"{layer.path}/lora_{name}_{part}"
                    if path not in axes:
                        axes[path] = found
                        optional.add(path)
    for rule, split, paths in rules_for(axes, automatic):
        if any(split):
            layout_map[rule] = split
            if optional.issuperset(paths):
                layout_map.optional.add(rule)
    # Only of layers with variables it is known which is which in a new build.
    numbered = {name for path in shapes for name in path.split("/")}
    for rule, found, _ in rules_for(outputs, automatic, automatic - numbered):
        (split, _), *_ = found
        layout_map[rule] = split
        layout_map.activations[rule] = found
        # Called within another model, a layer's output has a longer path.
        layout_map.optional.add(rule)
    return layout_map
