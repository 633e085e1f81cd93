"""`python -m moiety.doctor [--json]`: what is installed here, and what is missing.

Exits with 1 if the library or the operators cannot be used.
"""

import argparse
import json
import sys
from typing import Any

from . import _lib


def facts() -> Any:
    """build_info, and the checks of `moiety doctor` under "checks"."""
    found = _lib.build_info()
    if "error" not in found:
        found["checks"] = _lib.call_json("moiety_doctor", b".", 0)["checks"]
    for module in ("numpy", "safetensors", "transformers"):
        try:
            found[module] = __import__(module).__version__
        except ImportError:
            found[module] = None
    return found


def main(arguments: Any = None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m moiety.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    wanted = parser.parse_args(arguments)
    found = facts()
    usable = "error" not in found and found["operators"] is not None
    if wanted.json:
        print(json.dumps({"ok": usable, **found}))
        return 0 if usable else 1
    for check in found.pop("checks", []):
        print(f"{check['status']:<5} {check['name']:<14} {check['text']}")
    for name, value in found.items():
        print(f"{'':<5} {name:<14} {value if value not in (None, '') else '-'}")
    if not usable:
        print("FAIL  " + found.get("error", found.get("operators_error", "")))
    return 0 if usable else 1


if __name__ == "__main__":
    sys.exit(main())
