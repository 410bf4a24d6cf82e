"""Pictures of a plan: memory, the estimate, and the mesh on the chips."""

import io

# The parts of a chip's memory, and of a step's time, with their colours.
_MEMORY = (
    ("weights", "#4c72b0"),
    ("optimizer", "#8172b3"),
    ("other arguments", "#64b5cd"),
    ("gradients and temporaries", "#dd8452"),
    ("outputs and code", "#937860"),
)
_TIME = (
    ("compute", "#4c72b0"),
    ("exposed_collectives", "#c44e52"),
    ("hidden_collectives", "#e0a9ab"),
)
_GIB = 2**30


def memory_chart(report):
    """Draws the memory of a chip by part for all meshes, against its HBM.

    Args:
        report: `PlanReport`.

    Returns:
        `matplotlib.figure.Figure`.
    """
    meshes = _known(report)
    figure, axes = _figure(len(meshes))
    left = [0.0] * len(meshes)
    for part, colour in _MEMORY:
        sizes = [_memory_parts(mesh)[part] / _GIB for mesh in meshes]
        axes.barh(_names(meshes), sizes, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    line = report.hbm_bytes / _GIB
    axes.axvline(
        line, color="black", linestyle="--", label=f"a chip's {line:.2f} GiB"
    )
    axes.set_xlabel("GiB of a chip")
    axes.invert_yaxis()
    _legend(figure, axes)
    return figure


def time_chart(report):
    """Draws the estimated time of a step by part for all meshes.

    What runs beside computation is drawn below it.

    Args:
        report: `PlanReport`.

    Returns:
        `matplotlib.figure.Figure`.
    """
    meshes = _known(report)
    figure, axes = _figure(len(meshes))
    places = range(len(meshes))
    compute, exposed, hidden = (
        [mesh.parts[part] * 1e3 for mesh in meshes] for part, _ in _TIME
    )
    colours = [colour for _, colour in _TIME]
    axes.barh(places, compute, 0.5, color=colours[0], label="compute")
    axes.barh(
        places,
        exposed,
        0.5,
        left=compute,
        color=colours[1],
        label="waiting for other chips",
    )
    axes.barh(
        [place + 0.35 for place in places],
        hidden,
        0.15,
        color=colours[2],
        label="exchange beside it",
    )
    axes.set_yticks(list(places), _names(meshes))
    axes.set_xlabel("estimated milliseconds of a step")
    axes.invert_yaxis()
    _legend(figure, axes)
    return figure


def grid_chart(mesh):
    """Draws where the devices of a mesh stand in the grid of chips.

    Each chip says its place along every axis; hosts have colours. A grid with
    three dimensions is drawn layer by layer.

    Args:
        mesh: `MeshPlan`.

    Returns:
        `matplotlib.figure.Figure`.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    places = _places(mesh)
    coords = [(*c, 0, 0, 0)[:3] for c in mesh.coords]
    width, height, depth = (max(c[d] for c in coords) + 1 for d in range(3))
    figure = Figure(
        figsize=(max(5, 0.75 * width * depth), max(2, 0.6 * height + 1)),
        layout="constrained",
    )
    axes = figure.subplots()
    colours = colormaps["tab10"]
    for place, (x, y, z), host in zip(places, coords, mesh.hosts, strict=True):
        corner = x + z * (width + 0.5), y
        axes.add_patch(
            _square(corner, colours(host % 10)),
        )
        axes.text(
            corner[0] + 0.5,
            corner[1] + 0.5,
            ",".join(map(str, place)),
            ha="center",
            va="center",
            fontsize=7,
        )
    axes.set_xlim(-0.1, depth * (width + 0.5))
    axes.set_ylim(height + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    names = ", ".join(name for name, _ in mesh.axes)
    axes.set_title(
        f"place of each chip along ({names}); a colour is a host", fontsize=9
    )
    return figure


def as_png(figure):
    """Returns a figure as bytes of PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _known(report):
    return [mesh for mesh in report.meshes if not mesh.error]


def _names(meshes):
    return [mesh.name for mesh in meshes]


def _memory_parts(mesh):
    sizes = mesh.bytes
    arguments = sizes["weights"] + sizes["optimizer"]
    return {
        "weights": sizes["weights"],
        "optimizer": sizes["optimizer"],
        "other arguments": max(0, sizes["arguments"] - arguments),
        "gradients and temporaries": sizes["temporaries"],
        "outputs and code": sizes["outputs"] - sizes["alias"] + sizes["code"],
    }


def _figure(rows):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.4 * rows), layout="constrained")
    return figure, figure.subplots()


def _legend(figure, axes):
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _square(corner, colour):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 0.92, 0.92, facecolor=colour, alpha=0.55)


def _places(mesh):
    """Where each device stands along every axis of the mesh."""
    import numpy as np

    shape = [size for _, size in mesh.axes]
    return [tuple(map(int, place)) for place in np.ndindex(*shape)]
