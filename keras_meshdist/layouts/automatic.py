"""Tensor parallelism, read off a model."""

from keras_meshdist.abstract import abstract
from keras_meshdist.layouts.activations import output_axes
from keras_meshdist.layouts.choice import split_dimensions, weights_of
from keras_meshdist.layouts.sharded import (
    MIN_SIZE,
    check_axes,
    cut_places,
    finish,
    trace,
)
from keras_meshdist.pieces import as_entries, pieces_of, shard_further


def auto(
    model_or_build_fn,
    mesh,
    model_axis="model",
    fsdp_axis=None,
    expert_axis=None,
    sequence_axis=None,
    optimizer_axis=None,
    min_size=MIN_SIZE,
):
    """Layout rules for tensor parallelism, from the structure of a model.

    The model is traced, not run, and what its operations do says which
    dimensions of its weights belong together: those are split together, so
    that devices exchange as little as can be. In a transformer these are the
    heads, the width of the feed-forward block, and the vocabulary: query, key,
    value and the first feed-forward kernels by their output, the kernels that
    follow by their input, as in Megatron-LM. The same goes for any other
    model. Heads of keys and values that don't divide over the axis stay whole.

    Example:

    ```python
    mesh = kmd.make_mesh({"batch": 2, "model": 4})
    layout_map = kmd.layouts.auto(build_model, mesh)
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    model = build_model()
    ```

    Args:
        model_or_build_fn: `keras.Model`, or a function that returns one, which
            is then built without memory.
        mesh: `keras.distribution.DeviceMesh`.
        model_axis: str, or sequence of str: the mesh axes for tensor
            parallelism; `None` for none. Defaults to `"model"`.
        fsdp_axis: str, or sequence of str: the mesh axes over which large
            variables are sharded further, along another dimension, or what
            `model_axis` couldn't divide along the same one. Usually a batch
            axis. Defaults to `None`.
        expert_axis: str, or sequence of str: the mesh axes for the experts of
            a mixture-of-experts; then `model_axis` splits each expert.
            Defaults to `None`: the experts are split over `model_axis`.
        sequence_axis: str, or sequence of str: the mesh axes over which the
            sequence is split, the second dimension of inputs and of what
            layers return. An axis of its own, or the model axis: then the
            sequence is split where the heads and the feed-forward width
            aren't, as in Megatron-LM's sequence parallelism (Korthikanti et
            al., 2022, https://arxiv.org/abs/2205.05198). Defaults to `None`.
        optimizer_axis: str, or sequence of str: the mesh axes over which
            the optimizer's variables are sharded further than their weights
            (ZeRO stage 1, Rajbhandari et al., 2019,
            https://arxiv.org/abs/1910.02054). Usually the batch axes. Defaults
            to `None`.
        min_size: int, number of elements below which `fsdp_axis` and
            `optimizer_axis` leave a variable as it is. Defaults to 65536.

    Returns:
        A `LayoutMap`. Its `notes` say of each variable that stays whole why.

    Raises:
        ValueError: if an axis isn't in the mesh, or serves two purposes, or
            the model doesn't know its inputs.
    """
    names = check_axes(
        mesh,
        model_axis=model_axis,
        fsdp_axis=fsdp_axis,
        expert_axis=expert_axis,
        sequence_axis=sequence_axis,
        optimizer_axis=optimizer_axis,
    )
    model = abstract(model_or_build_fn)
    dimensions, variables = trace(model)
    weights, uses = weights_of(dimensions, variables), dimensions.uses()
    experts = _expert_dimensions(dimensions, weights)
    split = _choose(dimensions, weights, uses, experts, mesh, names)
    looked_up = {
        d
        for d, found in uses.items()
        if any(use.kind == "gathered" and use.weights for use in found)
    }
    shared = {d for w in weights if w.work for d in w.dims}
    over_model, over_fsdp = names["model_axis"], names["fsdp_axis"]
    layouts, notes = [], {}
    for weight, variable in zip(weights, variables, strict=True):
        axes, reason = _split_along(weight, split, experts, mesh)
        if over_model and not any(axes) and len(axes) > 1:
            dims = set(weight.dims)
            if looked_up & dims or not (weight.work or shared & dims):
                # A table whose rows don't divide goes by its columns, and so
                # does what only a task uses, such as an output embedding.
                problem = shard_further(axes, weight.shape, mesh, over_model, 0)
                reason = reason if problem else None
            elif not weight.work:
                # Positions, for example: the sequence would be split as well.
                reason = "what it is added to would be split as it is"
        if over_fsdp:
            cut = cut_places(weight, uses)
            both = over_fsdp if any(axes) else (*over_fsdp, *over_model)
            for some in dict.fromkeys((both, over_fsdp)):
                if not shard_further(
                    axes, weight.shape, mesh, some, min_size, cut=cut
                ):
                    break
        layouts.append((variable, as_entries(axes)))
        notes[variable.path] = reason
    sequence, outputs = names["sequence_axis"], {}
    if sequence or pieces_of(mesh, over_fsdp) > 1:
        outputs = output_axes(dimensions, split, sequence)
    layout_map = finish(mesh, model, layouts, notes, outputs)
    layout_map.sequence_axes = sequence
    layout_map.optimizer_axes = names["optimizer_axis"]
    layout_map.min_size = min_size
    return layout_map


def _choose(dimensions, weights, uses, experts, mesh, names):
    """Returns the axes over which dimensions are split, by dimension."""
    split, rest, over_model = {}, weights, names["model_axis"]
    if names["expert_axis"]:
        split.update(dict.fromkeys(experts, names["expert_axis"]))
    elif over_model:
        whole = _divisible(weights, experts, pieces_of(mesh, over_model))
        split.update(dict.fromkeys(whole, over_model))
        rest = [w for w in weights if not (_is_expert(w, whole))]
    if over_model:
        excluded = (
            dimensions.of_data()
            | dimensions.between_weights()
            | dimensions.between_activations()
            | experts
        )
        pieces = pieces_of(mesh, over_model)
        chosen = split_dimensions(rest, uses, pieces, excluded)
        split.update(dict.fromkeys(chosen, over_model))
    return split


def _split_along(weight, split, experts, mesh):
    """Returns a weight's axes, and why it stays whole, or `None`."""
    axes, reason, taken = [()] * len(weight.shape), None, set()
    for d, (dim, size) in enumerate(
        zip(weight.dims, weight.shape, strict=True)
    ):
        over = split.get(dim, ())
        if dim in experts and not _is_expert(weight, {dim}):
            continue  # the router chooses among all
        if not over or taken & set(over):
            continue
        if size % pieces_of(mesh, over):
            reason = f"{size} doesn't divide over {'/'.join(over)}"
            continue
        axes[d] = over
        taken |= set(over)
    return axes, reason


def _expert_dimensions(dimensions, weights):
    """Dimensions along which a weight is many, one for each expert."""
    return {
        d
        for d, uses in dimensions.uses().items()
        for use in uses
        if use.kind == "batched"
        and use.weights
        and all(d in weights[number].dims for number in use.weights)
        and any(len(weights[number].dims) > 2 for number in use.weights)
    }


def _is_expert(weight, dims):
    """Not the router, which has the experts as its outputs."""
    many = len(weight.dims) > (2 if weight.work else 1)
    return many and bool(dims & set(weight.dims))


def _divisible(weights, dims, pieces):
    """Those of some dimensions that divide wherever they are a weight's."""
    return {
        dim
        for dim in dims
        if all(
            size % pieces == 0
            for w in weights
            if len(w.dims) > 2
            for d, size in zip(w.dims, w.shape, strict=True)
            if d == dim
        )
    }
