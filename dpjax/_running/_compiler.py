"""How a program is compiled, which decides the bits of its outputs, beside the program."""

import functools
import os
import pathlib
import platform
from importlib.metadata import version
from typing import Any

import jax

from dpjax._running._layout import actual
from dpjax._version import __version__

# Neither the number of devices that a CPU plays nor dumps change a program.
_NO_EFFECT = ("--xla_force_host_platform_device_count", "--xla_dump")
_OPTIONS = (
    *("jax_disable_jit", "jax_disable_most_optimizations", "jax_optimization_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort"),
)
# A name such as "Xeon" stands for many processors. A virtual one may lack features of its model.
_MODEL = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
_VECTORS = ("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme")


def compilation(devices: tuple[Any, ...]) -> dict[str, str]:
    """How programs are compiled for devices, None for the default one; equal ones, equal bits."""
    used = [actual(device) for device in devices]
    libraries = f"dpjax {__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
    kinds = sorted({device.device_kind for device in used})
    words = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    flags = [word for word in words if not word.startswith(_NO_EFFECT)]
    options = [f"{name}={getattr(jax.config, name, None)}" for name in _OPTIONS]
    return {
        "backend": used[0].platform,
        "processor": _processor() if used[0].platform == "cpu" else ", ".join(kinds),
        "compiler flags": " ".join(flags + options),
        "versions": f"{libraries}, {used[0].client.platform_version}",
    }


@functools.cache
def _processor() -> str:
    """The model and its vector instructions, where Linux tells them."""
    try:
        first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    instructions = fields.get("flags", fields.get("Features", "")).split()
    vectors = sorted(word for word in instructions if word.startswith(_VECTORS))
    model = [fields[name] for name in _MODEL if name in fields]
    return " ".join([platform.machine(), *model, *vectors])
