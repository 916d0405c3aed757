"""Runs the README's first example with what is installed: `make package` calls it."""

import re
from pathlib import Path

import dpjax

README = Path(__file__).parents[1] / "README.md"

assert "site-packages" in dpjax.__file__, dpjax.__file__
exec(re.search(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[1])
