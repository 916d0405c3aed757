"""Accelerators that are not there: what XLA compiles for, and what they can do.

Peaks are those of data sheets: of float32 outside of matrix units on a GPU, and of the matrix unit
on a TPU, where a product of float32 at the highest precision takes six passes of bfloat16.
"""

import dataclasses
import os
import pathlib
from typing import Any

SPECS = pathlib.Path(__file__).with_name("specs")
# libtpu asks the network what machine this is, where these do not tell.
_TPU_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device.

    Attributes:
        platform: that of `jax.export`.
        topology: name of four connected ones.
        memory: bytes of one device.
        bandwidth: of its memory, bytes a second.
        flops: operations on float32 a second.
        launch: seconds that the start of a kernel takes.
        wait: seconds that a step of a loop takes whose length the host must read; none on a TPU.
    """

    platform: str
    topology: str
    memory: float
    bandwidth: float
    flops: float
    launch: float
    wait: float

    def devices(self) -> list[Any]:
        """Four devices that programs can be compiled for."""
        from jax.experimental import topologies

        if self.platform == "tpu":
            os.environ.update(_TPU_HOST)
            described = topologies.get_topology_desc(self.topology, "tpu")
        else:
            spec = (SPECS / f"{self.topology}.txtpb").read_text()
            described = topologies.get_topology_desc(
                "", "cuda", topology="1x1x4", target_config=spec
            )
        return list(described.devices)


ACCELERATORS = {
    "H100": Accelerator("cuda", "h100", 80e9, 3.35e12, 67e12, 3e-6, 15e-6),
    "H200": Accelerator("cuda", "h200", 141e9, 4.8e12, 67e12, 3e-6, 15e-6),
    "TPU v5e": Accelerator("tpu", "v5e:2x2", 16e9, 0.82e12, 197e12 / 6, 0.0, 0.0),
    "TPU v6e": Accelerator("tpu", "v6e:2x2", 32e9, 1.64e12, 918e12 / 6, 0.0, 0.0),
}
