"""Which mutants run: `make test-mutants`, of all files or of those that changed.

`CHANGED=main` chooses the mutants of what differs from this commit: of the file that they break, or
of a file of tests that must fail on them. Where nothing differs, as on main itself, it is compared
with its parent, and where git cannot tell, all files count as changed. `MUTANTS=40` runs so many,
drawn with the date of the commit as the seed: a mutant that is drawn is drawn all day. With both,
half of those are of what differs, if there are so many, and the others of all files.
"""

import hashlib
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

from code_patterns import replaced

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]
MUTANTS = {mutant["how"]: mutant for mutant in TABLE}
MOST_WITHOUT_GIT = 40


def broken_text(mutant):
    """The file of a mutant, and what is to be in it."""
    return replaced(mutant["where"], mutant["old"], mutant["new"])


def _git(*arguments):
    """The words that git prints, and none where it fails."""
    if shutil.which("git") is None:
        return []
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def _files_of(name):
    """The file that a mutant breaks, and those of its killers."""
    file, _ = broken_text(MUTANTS[name])
    return {str(file), *(killer.split("::")[0] for killer in MUTANTS[name]["killers"])}


def _touched(changed):
    """The mutants of what differs from a commit, and that commit; None where git cannot tell."""
    since = next((x for x in (changed, "HEAD~1") if _git("diff", "--name-only", x, "--")), None)
    files = set(_git("diff", "--name-only", since, "--")) if since else set()
    return {name for name in MUTANTS if files & _files_of(name)}, since


def chosen(changed, most):
    """The names of the mutants to run, and a sentence about the others."""
    (seed,) = _git("log", "-1", "--format=%cs") or ["0"]
    shuffled = sorted(MUTANTS, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    most, pool, said = int(most or 0), len(MUTANTS), "of all files"
    drawn = shuffled[: most or pool]
    if changed:
        touched, since = _touched(changed)
        first = [name for name in shuffled if name in touched]
        if most:
            first = first[: most // 2]
            drawn = [*first, *(name for name in shuffled if name not in first)][:most]
            said += f", {len(first)} of what differs from {since}" if since else ""
        elif since is None:
            drawn = shuffled[:MOST_WITHOUT_GIT]
            said = "of all files, for git knows of no change"
        else:
            drawn, pool, said = first, len(first), f"of what differs from {since}"
    text = f"{len(drawn)} of {pool} mutants {said}"
    if len(drawn) < pool:
        text += f", drawn with the seed {seed}"
    return [name for name in MUTANTS if name in set(drawn)], text


CHOSEN, SENTENCE = chosen(os.environ.get("DPJAX_CHANGED"), os.environ.get("DPJAX_MUTANTS"))
