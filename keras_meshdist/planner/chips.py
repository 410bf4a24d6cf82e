"""What a chip can do, by public figures.

Compute, memory and interconnect are those of Google's pages on each version
(https://docs.cloud.google.com/tpu/docs/v4, …/v5e, …/v5p, …/v6e) where they
agree with "How to Scale Your Model" (Austin et al., 2025,
https://jax-ml.github.io/scaling-book/tpus/), whose measured bandwidth of a
link and of the data center network is taken. What a program may take of the
memory is what libtpu says when it refuses one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one chip.

    Args:
        name: str, as people say it.
        kind: str, as libtpu says it in the name of a topology.
        hbm_bytes: int, memory that a program may use.
        peak_flops: float, bfloat16 operations a second.
        hbm_bandwidth: float, bytes a second.
        link_bandwidth: float, bytes a second over one link in one direction.
        clock: float, cycles a second of a TensorCore, from the peak and the
            number and size of its matrix units.
        network_bandwidth: float, bytes a second and chip between slices.
        dimensions: int, of the network of chips.
        wraps_at: int, a dimension of the network closes to a ring if its
            size is a multiple of this.
        host: tuple of int, chips of a host along each dimension.
        cores_named: bool, whether people's names count TensorCores, two a
            chip, and not chips.
    """

    name: str
    kind: str
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    clock: float
    network_bandwidth: float
    dimensions: int
    wraps_at: int
    host: tuple[int, ...]
    cores_named: bool = False


CHIPS = {
    "v4": Chip(
        name="v4",
        kind="v4",
        hbm_bytes=int(30.75 * 2**30),
        peak_flops=275e12,
        hbm_bandwidth=1.23e12,
        link_bandwidth=4.5e10,
        clock=1.05e9,
        network_bandwidth=6.25e9,
        dimensions=3,
        wraps_at=4,
        host=(2, 2, 1),
        cores_named=True,
    ),
    "v5e": Chip(
        name="v5e",
        kind="v5e",
        hbm_bytes=int(15.75 * 2**30),
        peak_flops=197e12,
        hbm_bandwidth=8.19e11,
        link_bandwidth=4.5e10,
        clock=1.5e9,
        network_bandwidth=3.125e9,
        dimensions=2,
        wraps_at=16,
        host=(2, 2, 1),
    ),
    "v5p": Chip(
        name="v5p",
        kind="v5p",
        hbm_bytes=int(95.74 * 2**30),
        peak_flops=459e12,
        hbm_bandwidth=2.765e12,
        link_bandwidth=9e10,
        clock=1.75e9,
        network_bandwidth=6.25e9,
        dimensions=3,
        wraps_at=4,
        host=(2, 2, 1),
        cores_named=True,
    ),
    "v6e": Chip(
        name="v6e",
        kind="v6e",
        hbm_bytes=int(31.25 * 2**30),
        peak_flops=918e12,
        hbm_bandwidth=1.638e12,
        link_bandwidth=9e10,
        clock=1.75e9,
        network_bandwidth=1.25e10,
        dimensions=2,
        wraps_at=16,
        host=(2, 2, 1),
    ),
}

# Virtual devices of one computer. These figures are no one's: they serve to
# compare meshes of the same devices with each other, and nothing else.
CPU = Chip(
    name="cpu",
    kind="cpu",
    hbm_bytes=16 * 2**30,
    peak_flops=2e10,
    hbm_bandwidth=5e9,
    link_bandwidth=1e9,
    clock=1e9,
    network_bandwidth=1e9,
    dimensions=1,
    wraps_at=1,
    host=(1,),
)
