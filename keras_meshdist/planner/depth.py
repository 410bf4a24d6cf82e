"""A deep model's figures, from those of a few shallow ones.

Blocks that are alike take alike: arguments, flops and what devices exchange
grow by the same with each. Temporaries don't from the first on: those of one
block may lie where another's did before.
"""

import collections

# Increments that differ by less are the same.
_AGREE = 0.05


def depths_to_compile(known):
    """Returns how many units to keep in what is compiled next.

    Args:
        known: dict from number of units to figures.

    Returns:
        List of int, empty if enough is known.
    """
    first = [d for d in (1, 2, 3) if d not in known]
    if first:
        return first
    if agrees(known) or 4 in known:
        return []
    return [4]


def agrees(known):
    """Whether the temporaries of the deepest models grow evenly."""
    one, two, three = (
        known[d]["bytes"]["temporaries"] for d in sorted(known)[-3:]
    )
    before, after = two - one, three - two
    return abs(after - before) <= _AGREE * max(abs(before), abs(after))


def extrapolated(known):
    """Returns the figures of the whole model.

    Args:
        known: dict from number of units to figures.

    Returns:
        Dict, as `figures` has it, with `notes` on what was done.
    """
    *_, third, second, first = sorted(known)
    last, before = known[first], known[second]
    units = last["units"]
    more = units - first

    def linear(*path):
        new, old = last, before
        for key in path:
            new, old = new[key], old[key]
        return new + more * (new - old)

    found = {**last, "notes": list(last["notes"])}
    found["flops"] = linear("flops")
    sizes = {key: linear("bytes", key) for key in last["bytes"]}
    low, high = _temporaries(known, (third, second, first), more)
    sizes["temporaries"] = high
    sizes["peak"] = (
        sizes["arguments"]
        + sizes["outputs"]
        - sizes["alias"]
        + sizes["temporaries"]
        + sizes["code"]
    )
    found["bytes"] = sizes
    found["temporaries_range"] = [low, high]
    found["parts"] = {key: linear("parts", key) for key in last["parts"]}
    found["step_seconds"] = linear("step_seconds")
    found["collectives"] = _collectives(last, before, more)
    # What the compiler says of a shallow model it would say of no other.
    found["too_large"] = None
    found["notes"].append(
        f"figures of {units} units of blocks are extrapolated from those of "
        f"{', '.join(map(str, sorted(known)))}"
    )
    if low != high:
        found["notes"].append(
            "temporaries don't grow evenly with the first blocks: between "
            f"{low / 2**30:.2f} and {high / 2**30:.2f} GiB, and the larger is "
            "taken"
        )
    return found


def _temporaries(known, depths, more):
    """The least and the most that temporaries may be."""
    one, two, three = (known[d]["bytes"]["temporaries"] for d in depths)
    before, after = two - one, three - two
    likely = three + more * after
    if agrees(known):
        return likely, likely
    other = three + more * before
    return max(three, min(likely, other)), max(three, likely, other)


def _collectives(last, before, more):
    """What a deep model exchanges.

    Where the same stands there more often, it goes on so. The compiler also
    puts small ones together: of those the sums go on.
    """
    new, old = (_counted(figures["collectives"]) for figures in (last, before))
    found = []
    rest = [key for key in {**new, **old} if new[key] < old[key]]
    odd = {(kind, axes) for kind, _, axes, _ in rest}
    for key, count in new.items():
        kind, _, axes, _ = key
        if (kind, axes) not in odd:
            found.append((*key, count + more * (count - old[key])))
    for kind, axes in sorted(odd):
        sums = []
        for counts in (new, old):
            picked = {
                k: n for k, n in counts.items() if (k[0], k[2]) == (kind, axes)
            }
            sums.append(
                (
                    sum(picked.values()),
                    sum(n * k[1] for k, n in picked.items()),
                )
            )
        (number, size), (number_before, size_before) = sums
        number = max(1, number + more * (number - number_before))
        size = size + more * (size - size_before)
        found.append((kind, round(size / number), axes, "", number))
    return [
        {
            "kind": kind,
            "bytes": size,
            "axes": list(axes),
            "count": count,
            "source": source,
        }
        for kind, size, axes, source, count in sorted(
            found, key=lambda c: (-c[1] * c[4], c[:4])
        )
    ]


def _counted(collectives):
    counts = collections.Counter()
    for c in collectives:
        key = c["kind"], c["bytes"], tuple(c["axes"]), c["source"]
        counts[key] += c["count"]
    return counts
