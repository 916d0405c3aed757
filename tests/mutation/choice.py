"""Which mutants run: `make test-mutants`, of all files or of those that changed.

`CHANGED=main` chooses the mutants of what differs from this commit: of the file that they break, or
of a file of tests that must fail on them. Where nothing differs, as on main itself, it is compared
with its parent, and where git cannot tell, all files count as changed. `MUTANTS=40` runs so many,
drawn with the date of the commit as the seed: a mutant that is drawn is drawn all day.
"""

import collections
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


def chosen(changed, most):
    """The names of the mutants to run, and a sentence about the others."""
    names, said, limit = list(MUTANTS), "of all files", len(MUTANTS)
    if changed:
        since = next((x for x in (changed, "HEAD~1") if _git("diff", "--name-only", x, "--")), None)
        if since is None:
            said, limit = "of all files, for git knows of no change", MOST_WITHOUT_GIT
        else:
            files = set(_git("diff", "--name-only", since, "--"))
            names = [name for name in names if files & _files_of(name)]
            said = f"of what differs from {since}"
    (seed,) = _git("log", "-1", "--format=%cs") or ["0"]
    count = min(int(most or limit), len(names))
    shuffled = sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    drawn = set(shuffled[:count])
    left = collections.Counter(
        str(broken_text(MUTANTS[x])[0].parent) for x in names if x not in drawn
    )
    text = f"{count} of {len(names)} mutants {said}"
    if left:
        places = ", ".join(f"{room} ({count})" for room, count in sorted(left.items()))
        text += f", drawn with the seed {seed}; left out: {places}"
    return [name for name in names if name in drawn], text


CHOSEN, SENTENCE = chosen(os.environ.get("DPJAX_CHANGED"), os.environ.get("DPJAX_MUTANTS"))
