"""What a plan means, in plain words."""

import collections
import itertools

# Estimates closer than this are no difference.
_SAME = 0.01
# From so many times the operations of another mesh on it is worth a word.
_MORE = 1.3
# Hosts that are named one by one.
_HOSTS = 4


def of_report(report):
    """Returns the sentences about a report, as a list of str."""
    lines = []
    fitting = [mesh for mesh in report.meshes if mesh.fits]
    if len(fitting) > 1:
        lines.append(_first_and_second(*fitting[:2]))
    elif not fitting and any(not mesh.error for mesh in report.meshes):
        nearest = next(m for m in report.meshes if not m.error)
        over = nearest.bytes["peak"] - report.hbm_bytes
        lines.append(
            f"No mesh fits. {nearest.name} comes nearest: it takes "
            f"{over / 2**30:.2f} GiB more than a chip has."
        )
    lines += [_suggestion(*pair) for pair in report.suggestions]
    lines += _same_for_the_compiler(fitting)
    if fitting:
        lines += of_mesh(fitting[0])
    lines += _made_twice(report.meshes)
    lines += _notes(report.meshes)
    for mesh in report.meshes:
        if mesh.too_large:
            text = too_large(mesh, report.hbm_bytes)
            lines.append(f"{mesh.name}: {text}.")
        if mesh.error:
            lines.append(f"{mesh.name}: {mesh.error}")
    if fitting and report.claimed:
        lines.append(
            "Times are estimates: the compiler's cycles, and collectives over "
            "the links they use; those that it begins early run beside what "
            "stands between beginning and end, all others are waited for."
        )
    elif fitting:
        lines.append(
            "Times on virtual CPU devices serve to compare meshes with each "
            "other; they are no estimate of anything."
        )
    return lines


def _suggestion(change, mesh):
    if mesh.error:
        return f"With {change} {mesh.name}: {mesh.error}"
    return (
        f"With {change} {mesh.name} takes {mesh.bytes['peak'] / 2**30:.2f} "
        f"GiB a chip: it {'fits' if mesh.fits else 'does not fit'}."
    )


def too_large(mesh, hbm_bytes):
    """Says in plain words why the compiler refuses a program."""
    gib = 2**30
    largest = ", ".join(f"{p} {s / gib:.2f} GiB" for p, s in mesh.largest)
    return (
        f"out of memory at compile time: {mesh.bytes['peak'] / gib:.2f} GiB on "
        f"each chip, which has {hbm_bytes / gib:.2f} GiB; the largest "
        f"variables: {largest}; the compiler says: {mesh.too_large}"
    )


def of_mesh(mesh):
    """Returns sentences about one mesh: its memory, its rings, its feeds."""
    return [_memory(mesh), _rings(mesh), _feeds(mesh)]


def _memory(mesh):
    sizes, gib = mesh.bytes, 2**30
    text = (
        f"{mesh.name}: on each chip weights take {sizes['weights'] / gib:.2f} "
        f"GiB, the optimizer {sizes['optimizer'] / gib:.2f}, and temporaries "
        f"{sizes['temporaries'] / gib:.2f}, in which gradients, "
        f"{sizes['gradients'] / gib:.2f} GiB in all, come and go."
    )
    if sizes["arguments_padding"]:
        text += (
            f" Of the arguments {sizes['arguments_padding'] / 2**20:.3g} MiB "
            "are padding, up to whole tiles."
        )
    return text


def _rings(mesh):
    parts = [
        f"along {axis!r} they {_lie(ring)}"
        for axis, ring in mesh.rings.items()
        if dict(mesh.axes)[axis] > 1
    ]
    where = "; ".join(parts) or "there is but one along each axis"
    return f"{mesh.name}: of the chips that exchange, {where}."


def _feeds(mesh):
    feeding = {host: rows for host, rows in mesh.feeds.items() if rows}
    padding = [host for host in mesh.feeds if host not in feeding]
    some = [
        f"host {host} {rows_in_words(rows)}"
        for host, rows in list(feeding.items())[:_HOSTS]
    ]
    text = f"{mesh.name}: of {mesh.rows} rows {', '.join(some)}"
    if len(feeding) > _HOSTS:
        text += f", and {len(feeding) - _HOSTS} more hosts theirs"
    if padding:
        text += f"; hosts {', '.join(padding[:_HOSTS])}"
        if len(padding) > _HOSTS:
            text += f" and {len(padding) - _HOSTS} more"
        text += " hold padding only"
    return f"{text}."


def rows_in_words(rows):
    """Rows that a host feeds: as a range where they are one."""
    if not rows:
        return "none: padding only"
    if rows == list(range(rows[0], rows[-1] + 1)):
        alone = len(rows) == 1
        return f"feeds {rows[0]}" if alone else f"feeds {rows[0]} to {rows[-1]}"
    return f"feeds {', '.join(map(str, rows))}"


def _made_twice(meshes):
    """Sentences about meshes whose chips do the same as others."""
    known = [mesh for mesh in meshes if not mesh.error]
    if not known:
        return []
    least = min(known, key=lambda mesh: mesh.flops)
    return [
        f"{mesh.name}: a chip makes {mesh.flops / least.flops:.1f} times the "
        f"operations that it makes with {least.name}: chips compute some of "
        "them several times over."
        for mesh in known
        if mesh.flops > _MORE * least.flops
    ]


def _notes(meshes):
    """Notes, each with the meshes that have it."""
    found = collections.defaultdict(list)
    for mesh in meshes:
        for note in mesh.notes:
            found[note].append(mesh.name)
    return [
        f"{'All' if len(names) == len(meshes) > 1 else '; '.join(names)}: "
        f"{note}."
        for note, names in found.items()
    ]


def _first_and_second(first, second):
    gain = second.step_seconds / first.step_seconds - 1
    if gain < _SAME:
        return (
            f"{first.name} and {second.name} take equally long by the estimate."
        )
    reasons = []
    for part, text in (
        ("compute", "a chip computes {:.3g} ms less"),
        ("exposed_collectives", "it waits {:.3g} ms less for other chips"),
    ):
        less = second.parts[part] - first.parts[part]
        if less > 0.1 * (second.step_seconds - first.step_seconds):
            reasons.append(text.format(less * 1e3))
    more = _heaviest_axes(second)
    text = (
        f"{first.name} is {gain:.0%} faster than {second.name} by the "
        f"estimate: {' and '.join(reasons) or 'in sum of all parts'}."
    )
    if more:
        text += f" The latter exchanges most over {more}."
    return text


def _heaviest_axes(mesh):
    """The axes over which a mesh moves the most bytes, in words."""
    moved = {}
    for c in mesh.collectives:
        axes = "/".join(c["axes"])
        moved[axes] = moved.get(axes, 0) + c["bytes"] * c["count"]
    moved.pop("", None)
    if not moved:
        return ""
    axes = max(moved, key=moved.get)
    return f"the axis {axes!r} ({moved[axes] / 2**20:.4g} MiB a step)"


def _same_for_the_compiler(meshes):
    """Sentences about axis orders between which the compiler sees nothing."""
    lines = []
    for one, other in itertools.combinations(meshes, 2):
        if sorted(one.axes) != sorted(other.axes) or not _equal(one, other):
            continue
        lines.append(
            f"Between {one.name} and {other.name} the compiler sees no "
            "difference: the same operations, memory and collectives. "
            f"{_physical(one, other)}"
        )
    return lines


def _equal(one, other):
    """Whether two programs compute and exchange the same."""

    def exchanged(mesh):
        found = {}
        for c in mesh.collectives:
            key = c["kind"], c["bytes"], tuple(sorted(c["axes"]))
            found[key] = found.get(key, 0) + c["count"]
        return found

    # Not the code: addresses in it may be longer or shorter.
    parts = ("arguments", "outputs", "alias", "temporaries")
    return (
        one.flops == other.flops
        and all(one.bytes[part] == other.bytes[part] for part in parts)
        and exchanged(one) == exchanged(other)
    )


def _physical(one, other):
    differ = []
    for axis, _ in one.axes:
        if one.rings[axis] != other.rings[axis]:
            differ.append(
                f"along {axis!r} the chips {_lie(one.rings[axis])} in the "
                f"first and {_lie(other.rings[axis])} in the second"
            )
    if one.feeds != other.feeds:
        differ.append("hosts feed other rows")
    if not differ:
        return "Neither do rings, hosts or input differ."
    return f"What differs is physical: {'; '.join(differ)}."


def _lie(ring):
    where = "are neighbours" if ring["neighbours"] else "aren't neighbours"
    if ring["rings"]:
        where += " in a closed ring"
    if ring["between_slices"]:
        where += ", and stand in several slices"
    return where
