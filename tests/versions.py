"""The fast tests under the oldest and the newest versions: `make test-versions`.

Each pair of a Python and a JAX has an environment of its own, as `.venv/for-3.13-jax-0.11`.
A Python that is not installed is skipped, which the last lines say.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = (("3.11", "0.10.2"), ("3.13", "0.11.*"))
# Level 1 compiles quickly. The Makefile has more flags, which JAX 0.11 does not know.
FLAGS = "--xla_backend_optimization_level=1"


def interpreter(version):
    """A Python of this version, on the search path or kept by pyenv; None where there is none."""
    candidates = [sys.executable, shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout
        kept = Path(root.strip(), "versions").glob(f"{version}.*/bin/python")
        candidates += sorted(map(str, kept))
    code = f"import sys; sys.exit(not sys.version.startswith('{version}.'))"
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
            return candidate
    return None


def prepared(found, version, jax):
    """The Python of an environment with this JAX, and what the tests need."""
    folder = ROOT / ".venv" / f"for-{version}-jax-{jax.removesuffix('.*')}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([found, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = [f"jax=={jax}", f"jaxlib=={jax}"]
    subprocess.run([*pip, "--editable", f"{ROOT}[test]", *wanted], check=True)
    return python


def main(arguments):
    """Runs pytest with these arguments under each pair; returns how many failed."""
    ends = {}
    for version, jax in VERSIONS:
        name = f"Python {version} with JAX {jax}"
        found = interpreter(version)
        if found is None:
            ends[name] = f"skipped: Python {version} is not installed"
            continue
        python = prepared(found, version, jax)
        command = [python, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *arguments]
        variables = {"XLA_FLAGS": FLAGS, **os.environ}
        done = subprocess.run(command, cwd=ROOT, env=variables, check=False)
        ends[name] = "passed" if done.returncode == 0 else f"pytest ended with {done.returncode}"
    for name, end in ends.items():
        print(f"{name}: {end}")
    return sum(end.startswith("pytest") for end in ends.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
